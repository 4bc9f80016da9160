"""A draft can learn: a handful of sequences by heart, in some dozens of steps."""

import jax
import numpy as np
import pytest

from dflash_jax.training import draft, loop

pytestmark = pytest.mark.slow

K, STEPS = 3, 60


@pytest.mark.parametrize("dflash2", [False, True], ids=["dflash", "dflash2"])
def test_a_draft_learns_a_few_sequences_by_heart(
    target_config, target_params, draft_config, dflash2
):
    config = draft_config(dflash2, window=8)
    random = np.random.default_rng(0)
    tokens = random.integers(2, 48, (4, 16)).astype(np.int32)
    anchors = np.tile(np.asarray([3, 6, 9, 12], np.int32), (4, 1))
    batch = draft.Batch(tokens, np.ones(4, bool), anchors)
    loss = draft.make_loss(target_config, target_params, config, K, 48, draft.DraftLoss())
    optimiser = loop.adamw(1e-2, STEPS)
    step = loop.make_step(loss, optimiser)
    state = loop.init_state(draft.init_params(config, 0), optimiser)
    history = []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        history.append(jax.device_get(metrics))
    first, last = history[0], history[-1]
    print({name: (float(first[name]), float(last[name])) for name in first})
    # A guess among 48 tokens costs ln 48 = 3.9 nats; by heart, next to nothing.
    assert first["unary_loss"] > 3.0 and first["accuracy"] < 0.2
    assert last["unary_loss"] < 0.1 * first["unary_loss"]
    assert last["accuracy"] > 0.95
    if dflash2:
        assert last["selector_loss"] < 0.2 * first["selector_loss"]
        assert last["selector_accuracy"] > 0.95 and last["recall"] > 0.95
