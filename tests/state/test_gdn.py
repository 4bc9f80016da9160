"""Convolution history and commit of a GDN state."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.state.gdn import GDNRecords, GDNState, advance_conv, fold, init_gdn

HISTORIES = (0, 1, 2, 3, 9)
COMMITTED = (0, 1, 2, 3, 4)


def window(inputs, width):
    """The last `width` inputs `[n, C]`, zeros on the left when there are fewer."""
    padded = np.concatenate([np.zeros((width, inputs.shape[1]), inputs.dtype), inputs])
    return padded[len(padded) - width :]


@pytest.mark.parametrize("width", [3, 1, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_conv_window(rng, width, dtype):
    # Every history length with every number of committed columns, as rows of one call.
    cases = list(itertools.product(HISTORIES, COMMITTED))
    layers, channels, columns = 2, 5, 5
    inputs = rng.normal(size=(layers, len(cases), 9 + columns, channels)).astype(dtype)
    history = np.zeros((layers, len(cases), width, channels), dtype)
    block = np.full((layers, len(cases), columns, channels), np.nan, dtype)
    expected = history.copy()
    for layer, (row, (length, count)) in itertools.product(range(layers), enumerate(cases)):
        seen = inputs[layer, row]
        history[layer, row] = window(seen[:length], width)
        block[layer, row, :count] = seen[length : length + count]
        expected[layer, row] = window(seen[: length + count], width)
    count = np.array([count for _, count in cases], np.int32)
    after = np.asarray(jax.jit(advance_conv)(history, block, count))
    assert after.dtype == dtype
    for layer, (row, case) in itertools.product(range(layers), enumerate(cases)):
        assert after[layer, row].tobytes() == expected[layer, row].tobytes(), case
    # Without a layer axis, as a prefill calls it.
    np.testing.assert_array_equal(jax.jit(advance_conv)(history[1], block[1], count), after[1])


def test_nothing_committed_keeps_every_bit(rng):
    # Negative zero and a NaN with a payload survive too.
    history = rng.normal(size=(1, 2, 3, 4)).astype(np.float32)
    history[0, :, 1] = -0.0
    history.view(np.uint32)[0, :, 2] = 0x7FC12345
    block = np.full((1, 2, 6, 4), np.nan, np.float32)
    after = advance_conv(history, block, np.array([0, 0], np.int32))
    assert np.asarray(after).tobytes() == history.tobytes()


def test_commit_advances_both_parts_of_each_row(rng, load_target):
    config = load_target("dense_text").config
    rows, width = 3, 4
    state = init_gdn(config, rows, jnp.float32)
    assert not np.asarray(state.recurrent).any() and not np.asarray(state.conv).any()
    layers = len(config.linear_layers)
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    state = GDNState(normal(*state.recurrent.shape), normal(*state.conv.shape))
    records = GDNRecords(
        key=normal(layers, rows, width, key_heads, key_dim),
        value=normal(layers, rows, width, value_heads, value_dim),
        g=-np.abs(normal(layers, rows, width, value_heads)),
        beta=np.abs(np.tanh(normal(layers, rows, width, value_heads))),
        conv=normal(layers, rows, width, config.conv_channels),
    )
    count = np.array([2, 0, 4], np.int32)
    for row, live in enumerate(count):
        for part in records:
            part[:, row, live:] = np.nan
    after = jax.jit(fold)(state, records, count)
    assert np.asarray(after.recurrent)[:, 1].tobytes() == state.recurrent[:, 1].tobytes()
    assert np.asarray(after.conv)[:, 1].tobytes() == state.conv[:, 1].tobytes()
    ratio = value_heads // key_heads
    for row, live in enumerate(count):
        joined = np.concatenate([state.conv[:, row], records.conv[:, row, :live]], axis=1)
        kept = state.conv.shape[2]
        np.testing.assert_array_equal(after.conv[:, row], joined[:, joined.shape[1] - kept :])
        wide = np.float64(state.recurrent[:, row])
        for column in range(live):
            key = np.float64(records.key[:, row, column]).repeat(ratio, axis=1)
            key /= np.sqrt((key * key).sum(-1, keepdims=True) + 1e-6)
            wide *= np.exp(np.float64(records.g[:, row, column]))[..., None, None]
            error = records.value[:, row, column] - np.einsum("lhk,lhkv->lhv", key, wide)
            update = records.beta[:, row, column][..., None] * error
            wide += key[..., None] * update[..., None, :]
        # A few float32 roundings of numbers near 1.
        np.testing.assert_allclose(after.recurrent[:, row], wide, rtol=5e-6, atol=5e-6)
