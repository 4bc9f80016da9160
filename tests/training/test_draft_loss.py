"""The losses of both drafts against a NumPy computation from hidden columns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.state.sequence import init_cache
from dflash_jax.target.model import TargetModel
from dflash_jax.training.draft import (
    Batch,
    DraftLoss,
    block_hidden,
    init_params,
    make_loss,
    pick_rows,
)
from dflash_jax.training.target import hidden_states

K, LENGTH, PUBLIC = 3, 14, 40
ANCHORS = np.asarray([[3, 5, 8], [4, 7, 10]], np.int32)


@pytest.fixture(scope="module")
def batch() -> Batch:
    tokens = np.random.default_rng(2).integers(2, PUBLIC, (2, LENGTH)).astype(np.int32)
    return Batch(tokens, np.asarray([True, False]), ANCHORS)


@pytest.fixture(scope="module")
def drafted(target_config, target_params, draft_config, random_draft, batch):
    """`dflash2 -> (config, params, [B, A, K, H] hidden mask columns of the batch in float64)`."""
    table = target_params["model"]["embed_tokens"]["weight"]

    @functools.cache
    def draft(dflash2):
        config = draft_config(dflash2)
        params = random_draft(config)
        words = np.full((ANCHORS.size, K + 1), config.mask_token_id)
        words[:, 0] = np.take_along_axis(batch.tokens, ANCHORS, axis=1).ravel()

        @jax.jit
        def compute(params):
            taps = hidden_states(
                target_config, target_params, batch.tokens, config.target_layer_ids
            ).taps
            return block_hidden(config, params, taps, table[words], batch.anchors)

        hidden = np.asarray(compute(params), np.float64)[:, 1:]
        return config, params, hidden.reshape(*ANCHORS.shape, K, -1)

    return draft


@pytest.fixture(scope="module")
def target_law(target_config, target_params, batch):
    """`(row, position) -> [V]` law of that position's token, from the tokens before it only."""
    model = TargetModel(target_config)
    empty = init_cache(target_config, 1, 0, 1, jnp.float32)

    @jax.jit
    def scores(tokens, length):
        block = model.apply(
            {"params": target_params}, tokens, jnp.zeros(1, jnp.int32), length, empty
        )
        return model.apply({"params": target_params}, block.hidden[0, length[0] - 1][None],
                           method="logits")[0]  # fmt: skip

    def law(row, position):
        tokens = np.full((1, LENGTH), 2, np.int32)
        tokens[0, :position] = batch.tokens[row, :position]
        return softmax(np.asarray(scores(tokens, np.asarray([position])), np.float64)[:PUBLIC])

    return law


def softmax(x):
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def expected_metrics(config, params, recipe, batch, hidden, head, target_law):
    """Loop by loop over blocks and slots; selector figures for DFlash2 only."""
    weight = np.exp(-np.arange(K) / recipe.gamma)
    weight /= weight.sum()
    selector = None
    if config.dflash2:
        selector = jax.tree.map(
            lambda leaf: np.asarray(leaf, np.float64), params["candidate_selector"]
        )
    total, sums = 0.0, {}

    def add(**values):
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + float(value) / (ANCHORS.size * K)

    for row, block in np.ndindex(ANCHORS.shape):
        anchor = ANCHORS[row, block]
        for slot in range(1, K + 1):
            gold = batch.tokens[row, anchor + slot]
            before = batch.tokens[row, anchor + slot - 1]
            scores = hidden[row, block, slot - 1] @ head[:PUBLIC].T
            law = np.eye(PUBLIC)[gold]
            if recipe.soft and not batch.greedy[row]:
                law = target_law(row, anchor + slot)
            unary = -(law * np.log(softmax(scores))).sum()
            total += weight[slot - 1] * unary / ANCHORS.size
            add(unary_loss=unary, accuracy=scores.argmax() == gold)
            if slot == 1:
                add(first_accuracy=K * (scores.argmax() == gold))
            if selector is None:
                continue
            shortlist = np.argsort(-scores, kind="stable")[: config.selector_top_k]
            inside = gold in shortlist
            if not inside and recipe.outside == "replace":
                shortlist[-1] = gold
            projected = selector["hidden_projection"]["weight"] @ hidden[row, block, slot - 1]
            energy = scores[shortlist] + (
                selector["successor_codebook"][shortlist]
                @ (selector["predecessor_codebook"][before] * projected)
            )
            mass = law[shortlist]
            loss = -(mass / max(mass.sum(), 1e-9) * np.log(softmax(energy))).sum()
            if not inside and recipe.outside == "skip":
                loss = 0.0
            total += recipe.selector_weight * weight[slot - 1] * loss / ANCHORS.size
            add(
                selector_loss=loss,
                recall=inside,
                shortlist_mass=mass.sum(),
                selector_accuracy=inside and shortlist[energy.argmax()] == gold,
            )
    return total, sums


def loss_of(target_config, target_params, config, recipe):
    return make_loss(target_config, target_params, config, K, PUBLIC, recipe)


RECIPES = {
    "dflash-hard": (False, DraftLoss(soft=False)),
    "dflash-soft": (False, DraftLoss(gamma=1.5)),
    "dflash2-replace-hard": (True, DraftLoss(soft=False)),
    "dflash2-replace-soft": (True, DraftLoss(selector_weight=0.7)),
    "dflash2-skip-hard": (True, DraftLoss(soft=False, outside="skip")),
    "dflash2-skip-soft": (True, DraftLoss(gamma=2.0, outside="skip")),
}


@pytest.mark.parametrize(("dflash2", "recipe"), RECIPES.values(), ids=RECIPES)
def test_loss_and_metrics(
    target_config, target_params, batch, drafted, target_law, dflash2, recipe
):
    config, params, hidden = drafted(dflash2)
    head = np.asarray(target_params["model"]["embed_tokens"]["weight"], np.float64)
    expected, sums = expected_metrics(config, params, recipe, batch, hidden, head, target_law)
    total, metrics = jax.jit(loss_of(target_config, target_params, config, recipe))(params, batch)
    np.testing.assert_allclose(total, expected, rtol=2e-5)
    assert set(metrics) == set(sums)
    for name, value in sums.items():
        np.testing.assert_allclose(metrics[name], value, rtol=5e-5, atol=1e-6, err_msg=name)
    if dflash2:
        assert 0 < sums["recall"] < 1  # gold tokens on both sides of the shortlist's border
        assert sums["selector_loss"] > 0.1


def test_padded_head_rows_do_not_reach_the_gradient(target_config, target_params, drafted, batch):
    """They are at minus infinity, which is one product away from NaN."""
    config, params, _ = drafted(True)
    loss = loss_of(target_config, target_params, config, DraftLoss())
    gradient, _ = jax.jit(jax.grad(loss, has_aux=True))(params, batch)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    codebook = np.asarray(gradient["candidate_selector"]["successor_codebook"])
    assert not codebook[PUBLIC:].any() and codebook[:PUBLIC].any()


def test_packed_blocks_are_the_mean_of_single_ones(target_config, target_params, drafted, batch):
    config, params, _ = drafted(True)
    loss = jax.jit(loss_of(target_config, target_params, config, DraftLoss()))
    row = Batch(batch.tokens[1:], batch.greedy[1:], np.asarray([[3, 5]]))
    together, _ = loss(params, row)
    single = [loss(params, row._replace(anchors=np.asarray([[at]])))[0] for at in (3, 5)]
    np.testing.assert_allclose(together, np.mean(single), rtol=1e-5)
    assert abs(single[0] - single[1]) > 0.01


def test_nothing_after_the_block_matters(target_config, target_params, drafted, batch):
    config, params, _ = drafted(True)
    loss = jax.jit(loss_of(target_config, target_params, config, DraftLoss()))
    before = batch._replace(anchors=np.asarray([[3, 5], [4, 8]]))
    changed = before.tokens.copy()
    changed[:, 12:] = 45  # the last label is at 8 + 3
    assert loss(params, before)[0] == loss(params, before._replace(tokens=changed))[0]
    changed[:, 11] = 45
    assert loss(params, before)[0] != loss(params, before._replace(tokens=changed))[0]


def test_an_untrained_dflash2_is_dflash_with_the_same_weights(
    target_config, target_params, draft_config, batch
):
    configs = {kind: draft_config(kind) for kind in (False, True)}
    params = init_params(configs[True], seed=4)
    shared = {
        name: {k: v for k, v in leaf.items() if not k.endswith("_conv")}
        for name, leaf in params.items()
        if name != "candidate_selector"
    }
    losses, metrics = {}, {}
    for kind, tree in ((False, shared), (True, params)):
        loss = loss_of(target_config, target_params, configs[kind], DraftLoss())
        losses[kind], metrics[kind] = jax.jit(loss)(tree, batch)
    assert jax.tree.structure(shared) == jax.tree.structure(init_params(configs[False], seed=4))
    for name in ("unary_loss", "accuracy", "first_accuracy"):
        np.testing.assert_allclose(metrics[True][name], metrics[False][name], rtol=1e-6)
    assert losses[True] > losses[False]  # by the selector's own term
    assert not np.asarray(params["candidate_selector"]["successor_codebook"]).any()


def test_only_the_two_rules_for_outsiders_exist():
    with pytest.raises(ValueError, match="outside: got 'drop', expected 'replace' or 'skip'"):
        DraftLoss(outside="drop")


# --- batches ---


@pytest.mark.parametrize(("total", "rows"), [(12, 3), (10, 4), (7, 7), (5, 8), (1, 2)])
def test_every_epoch_visits_each_sequence_once(total, rows):
    steps = 3 * total  # exactly 3 * rows epochs
    order = np.concatenate([pick_rows(total, rows, seed=3, step=step) for step in range(steps)])
    epochs = order.reshape(3 * rows, total)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(total), (3 * rows, 1)))
    if total > 6:
        assert (epochs[0] != epochs[1]).any()


def test_batches_depend_on_seed_and_step_only():
    np.testing.assert_array_equal(pick_rows(50, 4, 1, 9), pick_rows(50, 4, 1, 9))
    assert (pick_rows(50, 4, 1, 9) != pick_rows(50, 4, 2, 9)).any()
