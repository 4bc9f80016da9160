"""The drafts against outputs of the official package: context, block, proposals, round by round.

Tolerances of two correct float32 implementations: hidden 1e-4, logits 3e-4; token ids are exact.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import Causality
from dflash_jax.draft.context import attend_context, materialize
from dflash_jax.draft.model import DraftLayer, DraftModel
from dflash_jax.draft.proposal_head import proposal_scores
from dflash_jax.state.sequence import init_context
from pallas_kernels.candidate_selector import candidate_selector
from pallas_kernels.elementary import stable_top_k

HIDDEN, LOGITS = dict(rtol=0, atol=1e-4), dict(rtol=0, atol=3e-4)
# q moves by at most a quarter of what an energy over the temperature moves.
LAW = dict(rtol=0, atol=1e-4)
TEMPERATURE = 0.8  # of the stored sampled walks
PAGE = 16

DRAFTS = {
    "draft_v1_noncausal": Causality.NON_CAUSAL,
    "draft_v1_default": Causality.SLIDING_CAUSAL,
    "draft_v1_causal": Causality.CAUSAL,
    "draft_v1_full": Causality.SLIDING_CAUSAL,  # has no sliding layer
    "draft_v2_noncausal": Causality.NON_CAUSAL,
    "draft_v2_default": Causality.SLIDING_CAUSAL,
}


@functools.cache
def compiled_materialize(config):
    return jax.jit(functools.partial(materialize, config, dtype=jnp.float32))


@functools.cache
def compiled_block(config):
    model = DraftModel(config)

    @jax.jit
    def block(params, head, embeddings, frontier, live, context):
        """Hidden, residual of every layer, and scores of the mask columns."""
        positions = frontier[:, None] + jnp.arange(embeddings.shape[1])
        hidden, found = model.apply(
            {"params": params},
            embeddings,
            positions,
            attend_context(config, context, frontier, live),
            capture_intermediates=lambda module, _: isinstance(module, DraftLayer),
        )
        layers = [
            found["intermediates"][f"layers_{i}"]["__call__"][0]
            for i in range(config.num_hidden_layers)
        ]
        scores = hidden[:, 1:] @ head.T
        return hidden, layers, proposal_scores(config, scores, scores.shape[-1])

    return block


@functools.cache
def compiled_walk(config):
    model = DraftModel(config)

    @jax.jit
    def walk(params, hidden, scores, candidates, anchor, temperature, uniforms):
        projected, predecessor, successor = model.apply(
            {"params": params}, hidden, method="select"
        )
        unary = jnp.take_along_axis(scores, candidates, axis=-1)
        return candidate_selector(
            unary, candidates, projected, predecessor, successor, anchor, temperature, uniforms
        )

    return walk


class Rounds:
    """Runs the stored rounds of a folder once; results `[round]` without the batch axis.

    Every call has one shape: context chunks and blocks are padded with NaN, which nothing may
    read. The narrow last block so also is a block of fewer live columns.
    """

    def __init__(self, checkpoint):
        config, params, oracle = checkpoint
        count = sum(name.endswith(".block_ids") for name in oracle)
        appended = [oracle[f"r{r}.target_hidden"].shape[1] for r in range(count)]
        self.widths = [oracle[f"r{r}.block_ids"].shape[1] for r in range(count)]
        assert len(set(self.widths)) == 2
        self.frontiers = np.cumsum(appended)
        width = max(self.widths)
        # The rule of attention does not enter the context.
        shared = dataclasses.replace(config, causality=Causality.NON_CAUSAL)
        context = init_context(config, 1, self.frontiers[-1] + width, PAGE, jnp.float32)
        frontier = jnp.zeros(1, jnp.int32)
        self.hidden, self.layers, self.scores, self.contexts = [], [], [], []
        for r in range(count):
            features = widened(oracle[f"r{r}.target_hidden"], max(appended))
            live = jnp.array([appended[r]])
            context = compiled_materialize(shared)(params, context, features, frontier, live)
            frontier = frontier + live
            embeddings = widened(oracle[f"r{r}.noise_embedding"], width)
            live = jnp.array([self.widths[r]])
            head = oracle["target_lm_head"]
            results = compiled_block(config)(params, head, embeddings, frontier, live, context)
            hidden, layers, scores = jax.tree.map(lambda x: np.asarray(x)[0], results)
            self.hidden.append(hidden)
            self.layers.append(layers)
            self.scores.append(scores)
            self.contexts.append(context)


def widened(x, columns):
    return np.pad(x, [(0, 0), (0, columns - x.shape[1]), (0, 0)], constant_values=np.nan)


@pytest.fixture(scope="module")
def rounds(load_draft):
    return functools.cache(lambda name: Rounds(load_draft(name)))


@pytest.mark.parametrize("name", DRAFTS)
def test_blocks(load_draft, rounds, name):
    config, params, oracle = load_draft(name)
    assert config.causality is DRAFTS[name]
    run = rounds(name)
    fused = DraftModel(config).apply(
        {"params": params},
        oracle["r0.target_hidden"],
        method=lambda model, features: model.hidden_norm(model.fc(features)),
    )
    np.testing.assert_allclose(fused, oracle["layers.fused_context"], **HIDDEN)
    width = run.widths[0]
    for layer, hidden in enumerate(run.layers[0]):
        wanted = oracle[f"layers.hidden{layer}"][0]
        np.testing.assert_allclose(hidden[:width], wanted, **HIDDEN, err_msg=f"layer {layer}")
    for r, width in enumerate(run.widths):
        where = f"round {r}"
        np.testing.assert_allclose(
            run.hidden[r][:width], oracle[f"r{r}.hidden"][0], **HIDDEN, err_msg=where
        )
        scores = run.scores[r][: width - 1]
        np.testing.assert_allclose(scores, oracle[f"r{r}.logits"][0], **LOGITS, err_msg=where)
        if not config.dflash2:
            np.testing.assert_array_equal(scores.argmax(-1), oracle[f"r{r}.argmax"][0], where)


@pytest.mark.parametrize("name", [name for name in DRAFTS if "v2" in name])
def test_selector(load_draft, rounds, name):
    config, params, oracle = load_draft(name)
    run, walk = rounds(name), compiled_walk(config)
    for r, width in enumerate(run.widths):
        where, live = f"round {r}", width - 1
        # Columns beyond a narrow block cannot reach back; NaN there would fail the comparison.
        scores = np.nan_to_num(run.scores[r])[None]
        hidden = np.nan_to_num(run.hidden[r])[None, 1:]
        anchor = jnp.asarray(oracle[f"r{r}.block_ids"][:, 0], jnp.int32)
        columns = scores.shape[1]

        _, candidates = stable_top_k(jnp.asarray(scores), config.selector_top_k)
        # The reference promises no order.
        np.testing.assert_array_equal(
            np.sort(candidates[0, :live]), np.sort(oracle[f"r{r}.candidates"][0]), where
        )
        greedy, choices, q = walk(
            params, hidden, scores, candidates, anchor, jnp.zeros(1), jnp.zeros((1, columns))
        )
        np.testing.assert_array_equal(greedy[0, :live], oracle[f"r{r}.path"][0], where)
        one_hot = np.eye(config.selector_top_k)[np.asarray(choices[0])]
        np.testing.assert_array_equal(q[0], one_hot)

        # The stored walk again: each uniform lies in the middle of the stored choice's interval.
        law = oracle[f"r{r}.sampled_q"][0]
        order = oracle[f"r{r}.sampled_candidates"][0]
        path = oracle[f"r{r}.sampled_path"][0]
        chosen = np.argmax(order == path[:, None], axis=-1)
        cumulative = np.cumsum(law, axis=-1)
        rows = np.arange(live)
        uniforms = np.zeros((1, columns), np.float32)
        uniforms[0, :live] = cumulative[rows, chosen] - law[rows, chosen] / 2
        forced = np.array(candidates)
        forced[0, :live] = order
        tokens, _, q = walk(
            params, hidden, scores, forced, anchor, jnp.full(1, TEMPERATURE), uniforms
        )
        np.testing.assert_array_equal(tokens[0, :live], path, where)
        np.testing.assert_allclose(q[0, :live], law, **LAW, err_msg=where)


@pytest.mark.parametrize("name", ["draft_v1_default", "draft_v2_noncausal"])
def test_narrow_block_by_itself(load_draft, rounds, name):
    # The last block in an array of its own width.
    config, params, oracle = load_draft(name)
    run = rounds(name)
    last = len(run.widths) - 1
    width = run.widths[last]
    hidden, _, scores = compiled_block(config)(
        params,
        oracle["target_lm_head"],
        oracle[f"r{last}.noise_embedding"],
        jnp.asarray(run.frontiers[last:], jnp.int32),
        jnp.array([width]),
        run.contexts[last],
    )
    np.testing.assert_allclose(hidden, oracle[f"r{last}.hidden"], **HIDDEN)
    np.testing.assert_allclose(scores, oracle[f"r{last}.logits"], **LOGITS)


def test_input_of_a_block(load_draft, load_target):
    """Column 0 is the anchor's embedding, the others the mask's: rows of the target's table."""
    config, _, oracle = load_draft("draft_v1_noncausal")
    table = np.asarray(load_target("dense_text").params["model"]["embed_tokens"]["weight"])
    np.testing.assert_array_equal(table, oracle["target_embed"])
    frontier = oracle["r0.target_hidden"].shape[1]
    np.testing.assert_array_equal(
        oracle["r0.noise_embedding"][0, 0], table[oracle["context_ids"][0, frontier]]
    )
    for column in oracle["r0.noise_embedding"][0, 1:]:
        np.testing.assert_array_equal(column, table[config.mask_token_id])
