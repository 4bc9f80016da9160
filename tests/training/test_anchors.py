"""Packed anchors: what a block sees in training is what it will see when decoding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import Causality
from dflash_jax.config.draft import FULL, SLIDING
from dflash_jax.draft.context import attend_context, materialize
from dflash_jax.draft.model import DraftModel
from dflash_jax.draft.proposal_head import proposal_scores
from dflash_jax.state.sequence import init_context
from dflash_jax.training.anchors import attend_packed, block_targets, draw_anchors
from dflash_jax.training.draft import block_hidden

KINDS = pytest.mark.parametrize("dflash2", [False, True], ids=["dflash", "dflash2"])
WIDTH = 4
NON_CAUSAL, SLIDING_CAUSAL, CAUSAL = (
    Causality.NON_CAUSAL,
    Causality.SLIDING_CAUSAL,
    Causality.CAUSAL,
)

# --- drawing ---


def test_anchors_are_distinct_ascending_and_leave_room_for_the_block():
    seen = set()
    for step in range(40):
        anchors = draw_anchors(5, 6, 3, 20, 4, seed=1, step=step)
        assert anchors.dtype == np.int32
        assert (np.diff(anchors, axis=1) > 0).all()
        seen |= set(anchors.ravel().tolist())
    assert seen == set(range(3, 16))  # 15 + 4 is the last token; 3 the first allowed anchor


def test_anchors_depend_on_seed_step_and_row():
    def draw(seed, step):
        return draw_anchors(4, 8, 0, 100, 3, seed=seed, step=step)

    np.testing.assert_array_equal(draw(0, 7), draw(0, 7))
    assert (draw(0, 7) != draw(0, 8)).any()
    assert (draw(0, 7) != draw(1, 7)).any()
    rows = draw(0, 7)
    assert all((rows[0] != rows[i]).any() for i in range(1, 4))


def test_every_position_may_be_drawn_and_no_more():
    whole = draw_anchors(2, 13, 3, 20, 4, seed=0, step=0)
    np.testing.assert_array_equal(whole, np.tile(np.arange(3, 16), (2, 1)))
    with pytest.raises(ValueError, match="anchors: got 14, expected at most 13"):
        draw_anchors(2, 14, 3, 20, 4, seed=0, step=0)


def test_slot_k_is_the_token_at_anchor_plus_k():
    tokens = jnp.stack([100 + jnp.arange(12), 200 + jnp.arange(12)])
    words = block_targets(tokens, jnp.asarray([[3, 5], [0, 8]]), 3)
    expected = [
        [[103, 104, 105, 106], [105, 106, 107, 108]],
        [[200, 201, 202, 203], [208, 209, 210, 211]],
    ]
    np.testing.assert_array_equal(words, expected)


# --- who sees whom ---


def attention_weights(config, anchor, width, length):
    """`[W, T + W]` weights of layer 0 over context and block, read off one-hot values."""
    config = dataclasses.replace(config, head_dim=length + width + (length + width) % 2)
    dim = config.head_dim
    random = np.random.default_rng(0)
    key = random.normal(size=(1, 1, length, 1, dim)).astype(np.float32)
    value = np.eye(length, dim, dtype=np.float32)[None, None, :, None]
    gain = np.ones((1, dim), np.float32)
    query = random.normal(size=(1, width, 2, dim)).astype(np.float32)
    block_key = random.normal(size=(1, width, 1, dim)).astype(np.float32)
    block_value = np.eye(width, dim, k=length, dtype=np.float32)[None, :, None]
    attend = attend_packed(config, key, value, gain, jnp.asarray([[anchor]]), width)
    weights = attend(0, query, block_key, block_value)
    return np.asarray(weights)[0, :, 0, : length + width]


def visible(weights, anchor, length):
    """Positions seen by each column. Context at the anchor or later counts as 1000 + position."""
    context = np.arange(length)
    context = np.where(context < anchor, context, 1000 + context)
    positions = np.concatenate([context, anchor + np.arange(weights.shape[1] - length)])
    return [positions[row > 0].tolist() for row in weights]


SPANS = {
    (SLIDING, NON_CAUSAL): [(5, 11), (6, 12), (7, 12), (8, 12), (9, 12)],
    (SLIDING, CAUSAL): [(5, 8), (6, 9), (7, 10), (8, 11), (9, 12)],
    (SLIDING, SLIDING_CAUSAL): [(5, 8), (6, 9), (7, 10), (8, 11), (9, 12)],
    (FULL, NON_CAUSAL): [(0, 12)] * 5,
    (FULL, CAUSAL): [(0, 8 + i) for i in range(5)],
    (FULL, SLIDING_CAUSAL): [(0, 12)] * 5,
}


@pytest.mark.parametrize(("kind", "causality"), SPANS)
def test_visible_positions_around_an_anchor_at_8(draft_config, kind, causality):
    """Window 4, block 8..12, 14 tokens of context of which eight are before the anchor."""
    config = draft_config(False, (kind,), causality)
    weights = attention_weights(config, anchor=8, width=5, length=14)
    np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-6)
    expected = [list(range(a, b + 1)) for a, b in SPANS[kind, causality]]
    assert visible(weights, 8, 14) == expected


def test_a_window_of_the_whole_length_is_no_window(draft_config):
    wide = attention_weights(draft_config(False, (SLIDING,), window=19), 8, 5, 14)
    full = attention_weights(draft_config(False, (FULL,)), 8, 5, 14)
    np.testing.assert_array_equal(wide, full)


# --- gradients ---


def make_gradients(config, params, anchors, length=12):
    """`block -> |gradients|` of its hidden columns for features [B, T, F] and inputs [BA, W, H]."""
    random = np.random.default_rng(3)
    width = len(config.target_layer_ids) * config.hidden_size
    features = random.normal(size=(len(anchors), length, width)).astype(np.float32)
    inputs = random.normal(size=(anchors.size, WIDTH, config.hidden_size)).astype(np.float32)
    weight = random.normal(size=(WIDTH, config.hidden_size)).astype(np.float32)

    def loss(features, inputs, block):
        hidden = block_hidden(config, params, features, inputs, jnp.asarray(anchors))
        return jnp.sum(hidden[block] * weight)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    return lambda block: [np.abs(np.asarray(g)) for g in gradient(features, inputs, block)]


@KINDS
def test_a_block_depends_on_earlier_features_and_itself_alone(draft_config, random_draft, dflash2):
    config = draft_config(dflash2)
    gradients = make_gradients(config, random_draft(config), np.asarray([[3, 5]]))
    for block, anchor in ((0, 3), (1, 5)):
        to_features, to_inputs = gradients(block)
        assert to_features[0, anchor:].max() == 0.0
        assert (to_features[0, :anchor].max(axis=-1) > 1e-6).all()
        assert to_inputs[1 - block].max() == 0.0
        assert (to_inputs[block].max(axis=-1) > 1e-6).all()


def test_local_layers_alone_see_a_window_of_features(draft_config, random_draft):
    config = draft_config(True, (SLIDING, SLIDING))
    to_features, _ = make_gradients(config, random_draft(config), np.asarray([[3, 8]]))(1)
    # Two layers do not widen the window: context keys are projections, not layer outputs.
    np.testing.assert_array_equal(np.flatnonzero(to_features[0].max(axis=-1)), [5, 6, 7])


@KINDS
def test_sequences_of_a_batch_do_not_see_each_other(draft_config, random_draft, dflash2):
    config = draft_config(dflash2)
    gradients = make_gradients(config, random_draft(config), np.asarray([[3, 5], [4, 8]]))
    for block, own in ((1, 0), (2, 1)):
        to_features, to_inputs = gradients(block)
        assert to_features[1 - own].max() == 0.0
        assert to_features[own].max() > 1e-3
        assert np.delete(to_inputs, block, axis=0).max() == 0.0


# --- training equals decoding ---


def decoding_hidden(config, params, features, inputs, anchors):
    """The same blocks through rings and pages, one batch row per block; features [1, T, F]."""
    rows, width = inputs.shape[:2]
    frontier = jnp.asarray(anchors, jnp.int32)
    context = init_context(config, rows, 32, 8, jnp.float32)
    repeated = jnp.repeat(features, rows, axis=0)
    # In two chunks, as a prompt and what came after it would arrive.
    first = jnp.minimum(frontier, 3)
    context = materialize(
        config, params, context, repeated[:, :3], jnp.zeros(rows, jnp.int32), first, jnp.float32
    )
    context = materialize(
        config, params, context, repeated[:, 3:], first, frontier - first, jnp.float32
    )
    live = jnp.full(rows, width, jnp.int32)
    positions = frontier[:, None] + jnp.arange(width)
    attend = attend_context(config, context, frontier, live)
    return DraftModel(config).apply({"params": params}, inputs, positions, attend)


@KINDS
@pytest.mark.parametrize("causality", [NON_CAUSAL, SLIDING_CAUSAL, CAUSAL])
def test_training_hidden_and_logits_equal_the_decoding_drafts(
    draft_config, random_draft, target_params, dflash2, causality
):
    config = draft_config(dflash2, (SLIDING, FULL, SLIDING), causality)
    params = random_draft(config)
    anchors = np.asarray([[3, 7, 10]])  # contexts shorter and longer than the window of 4
    table = target_params["model"]["embed_tokens"]["weight"]
    random = np.random.default_rng(5)
    width = len(config.target_layer_ids) * config.hidden_size
    features = random.normal(size=(1, 14, width)).astype(np.float32)
    words = np.full((3, WIDTH), config.mask_token_id)
    words[:, 0] = 7, 30, 12
    inputs = table[words]

    trained = jax.jit(lambda p: block_hidden(config, p, features, inputs, jnp.asarray(anchors)))(
        params
    )
    decoded = jax.jit(lambda p: decoding_hidden(config, p, features, inputs, anchors[0]))(params)
    np.testing.assert_allclose(trained, decoded, atol=2e-5)
    scores = [proposal_scores(config, hidden @ table.T, 40) for hidden in (trained, decoded)]
    np.testing.assert_allclose(*scores, atol=2e-4)
    assert np.abs(np.asarray(trained)).mean() > 0.3


@pytest.mark.parametrize(
    "name",
    ["draft_v1_causal", "draft_v1_noncausal", "draft_v1_full", "draft_v2_default",
     "draft_v2_noncausal"],
)  # fmt: skip
def test_packed_blocks_equal_the_official_packages_rounds(load_draft, name):
    """All rounds of the reference in one packed forward; the narrow last round by itself."""
    config, params, oracle = load_draft(name)
    rounds = sum(key.endswith(".block_ids") for key in oracle)
    pieces = [oracle[f"r{r}.target_hidden"] for r in range(rounds)]
    features = np.concatenate(pieces, axis=1)
    anchors = np.cumsum([piece.shape[1] for piece in pieces])
    by_width = {}
    for r in range(rounds):
        by_width.setdefault(oracle[f"r{r}.block_ids"].shape[1], []).append(r)
    assert len(by_width) == 2
    for group in by_width.values():
        inputs = np.concatenate([oracle[f"r{r}.noise_embedding"] for r in group])
        expected = np.concatenate([oracle[f"r{r}.hidden"] for r in group])
        at = jnp.asarray(anchors[group])[None]
        hidden = block_hidden(config, params, features, inputs, at)
        np.testing.assert_allclose(hidden, expected, atol=2e-4)
