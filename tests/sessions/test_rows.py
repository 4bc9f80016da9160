"""Rows move whole: every array of a row, none of its neighbours'."""

import jax
import numpy as np
import pytest

from dflash_jax.decoding.distribution import Sampling, make_controls
from dflash_jax.sessions import rows
from dflash_jax.state.counts import TokenCounts
from dflash_jax.state.sequence import init_sequences
from tests.decoding import tiny

ROWS = 3


def numbered(draft):
    """A state in which no two arrays nor elements are alike."""
    seeds = np.zeros(ROWS, np.uint32)
    state = init_sequences(tiny.SMALL, draft, seeds, 16, 4, "float32", 8)
    leaves, tree = jax.tree.flatten(state)
    rng = np.random.default_rng(0)
    return tree.unflatten(
        [np.asarray(rng.permutation(leaf.size) + 1).reshape(leaf.shape).astype(leaf.dtype)
         for leaf in leaves]
    )  # fmt: skip


@pytest.mark.parametrize("draft", [tiny.DFLASH, tiny.DFLASH2, None])
def test_a_row_goes_to_another_place_whole(draft):
    """One row of one state into another state: all of it arrives, all else stays."""
    state = numbered(draft)
    other = jax.tree.map(lambda leaf: np.zeros_like(leaf), state)
    row = np.int32(1)
    moved = jax.jit(lambda a, b: rows.put(b, row, rows.take(a, row)))(state, other)
    moved = jax.device_get(moved)
    axes = jax.tree.leaves(rows.row_axes(state))
    leaves = [jax.tree.leaves(tree) for tree in (state, other, moved)]
    assert len(axes) == len(leaves[0])
    for axis, source, before, after in zip(axes, *leaves, strict=True):
        if axis == rows.SHARED:
            np.testing.assert_array_equal(after, source)
            continue
        assert source.shape[axis] == ROWS
        np.testing.assert_array_equal(np.take(after, 1, axis), np.take(source, 1, axis))
        np.testing.assert_array_equal(np.delete(after, 1, axis), np.delete(before, 1, axis))


@pytest.mark.parametrize("draft", [tiny.DFLASH, tiny.DFLASH2, None])
def test_an_installed_sequence_takes_the_whole_row(draft):
    """What comes is what is there; of who was there before nothing, and the others stay."""
    state = numbered(draft)
    dense = jax.tree.map(lambda leaf: -leaf, rows.dense_of(state, np.int32(0)))
    before = rows.take(state, np.int32(2))
    table = np.asarray([7, -1], np.int32)
    counts = TokenCounts(~before.counts.prompt, before.counts.output + 1)
    numbers = rows.Numbers(np.int32(11), np.int32(22), np.uint32(33))
    installed = jax.jit(rows.install)(state, np.int32(2), table, dense, numbers, counts)
    installed = jax.device_get(installed)
    one = rows.take(installed, np.int32(2))
    assert (one.frontier, one.context_frontier, one.anchor, one.seed) == (11, 11, 22, 33)
    jax.tree.map(np.testing.assert_array_equal, rows.dense_of(installed, np.int32(2)), dense)
    jax.tree.map(np.testing.assert_array_equal, one.counts, counts)
    for pool, old in zip(rows.pools(one), rows.pools(before), strict=True):
        np.testing.assert_array_equal(pool.block_table, table[None])
        np.testing.assert_array_equal(pool.key, old.key)
    if draft is not None:
        assert not np.any(one.pending)
    for axis, old, new in zip(
        jax.tree.leaves(rows.row_axes(state)),
        jax.tree.leaves(state),
        jax.tree.leaves(installed),
        strict=True,
    ):
        if axis != rows.SHARED:
            np.testing.assert_array_equal(np.delete(new, 2, axis), np.delete(old, 2, axis))


def test_controls_move_alike():
    many = make_controls([Sampling(0.1 * i, top_k=i) for i in range(ROWS)], width=2)
    own = make_controls([Sampling(0.7, 9, 0.6, 0.5, 1.0, 2.0, 3.0)], [(4, 5)], [6])
    after = rows.put_controls(many, np.int32(1), own)
    for whole, was, one in zip(after, many, rows.take_controls(after, np.int32(1)), strict=True):
        assert np.all(whole[0] == was[0]) and np.all(whole[2] == was[2])
        np.testing.assert_array_equal(one, whole[1:2])
    for one, wanted in zip(rows.take_controls(after, np.int32(1)), own, strict=True):
        np.testing.assert_array_equal(one, wanted)
