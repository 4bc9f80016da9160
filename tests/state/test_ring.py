"""The live interval of a ring: written, kept and read by absolute position."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.state.ring import RingKV, init_ring
from pallas_kernels.context_kv_materialize import context_kv_materialize
from pallas_kernels.sliding_window_attention import sliding_window_attention


@pytest.fixture(scope="module")
def config(load_draft):
    return load_draft("draft_v1_noncausal").config


def positions_held(slots, frontier):
    """Slot -> the live position in it, by the rule of the specification."""
    return {p % slots: p for p in range(max(0, frontier - slots), frontier)}


def test_geometry_and_dtypes(config):
    ring = init_ring(config, 2, jnp.float32)
    assert ring.key.dtype == ring.value.dtype == jnp.float32
    assert ring.slots == config.sliding_window
    assert ring.key.shape[0] == len(config.local_layers)
    assert not np.asarray(ring.key).any() and not np.asarray(ring.value).any()
    # The specification's stored formats: bfloat16 keys, float16 values.
    ring = init_ring(config, 1, jnp.bfloat16)
    assert (ring.key.dtype, ring.value.dtype) == (jnp.bfloat16, jnp.float16)


@pytest.mark.parametrize("chunks", [[1] * 7, [3, 2, 1, 4], [5, 5], [4, 9, 1], [23], [0, 6, 0, 1]])
def test_live_interval_after_chunks(config, chunks):
    # Values are their own positions, so that a slot says what it holds; the rest stays NaN.
    slots, heads, dim = 5, 1, 4
    ring = RingKV(*np.full((2, 1, 1, slots, heads, dim), np.nan, np.float32))
    write = functools.partial(context_kv_materialize, eps=1e-6, theta=1e4, rotary_dim=dim)
    write = jax.jit(write)
    frontier, width = 0, max(chunks) + 1
    for count in chunks:
        # Dead columns hold a position too, which must not appear.
        value = np.arange(frontier, frontier + width, dtype=np.float32)
        value = np.broadcast_to(value[:, None, None], (1, 1, width, heads, dim))
        start, live = jnp.int32([frontier]), jnp.int32([count])
        ring = RingKV(*write(value + 1, value, np.ones((1, dim)), *ring, start, live))
        frontier += count
        expected = np.full(slots, np.nan)
        for slot, position in positions_held(slots, frontier).items():
            expected[slot] = position
        np.testing.assert_array_equal(ring.value[0, 0, :, 0, 0], expected)


@pytest.mark.parametrize("frontier", [0, 1, 4, 5, 6, 13])
def test_only_the_live_interval_is_read(frontier):
    # Equal scores: the output is the mean of the positions a column may see.
    slots, columns, dim = 5, 3, 4
    value = np.full(slots, np.nan, np.float32)
    for slot, position in positions_held(slots, frontier).items():
        value[slot] = position
    shape = (1, 1, slots, 1, dim)
    ring_value = np.broadcast_to(value[:, None, None], shape)
    ring_key = np.where(np.isnan(ring_value), np.nan, 0).astype(np.float32)
    block = np.arange(frontier, frontier + columns, dtype=np.float32)
    block = np.broadcast_to(block[:, None, None], (1, columns, 1, dim))
    output = sliding_window_attention(
        np.zeros_like(block), np.zeros_like(block), block, ring_key, ring_value,
        jnp.int32([frontier]), jnp.int32([columns]), layer=0,
    )  # fmt: skip
    for column in range(columns):
        query = frontier + column
        seen = [p for p in range(frontier + columns) if abs(p - query) < slots]
        seen = [p for p in seen if p >= frontier - slots]
        np.testing.assert_allclose(output[0, column, 0], np.mean(seen), rtol=1e-6)
