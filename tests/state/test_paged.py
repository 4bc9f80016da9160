"""Appending to the paged store: what is written, and that nothing else is touched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.state.paged import (
    PagedKV,
    append,
    copy_page,
    init_paged,
    read_pages,
    write_pages,
)

LAYERS, HEADS, DIM = 2, 2, 3

compiled_append = jax.jit(append)


def make_pool(pages, page_size, table, rng):
    """A pool of random old bytes."""
    key, value = rng.normal(size=(2, LAYERS, pages, page_size, HEADS, DIM)).astype(np.float32)
    return PagedKV(jnp.asarray(key), jnp.asarray(value), jnp.asarray(table, jnp.int32))


def expected_append(pool, key, value, start, count):
    """Position by position in NumPy; a position without a page is skipped."""
    stored = [np.array(pool.key), np.array(pool.value)]
    page_size, table = pool.key.shape[2], np.asarray(pool.block_table)
    for row in range(len(start)):
        for column in range(count[row]):
            position = start[row] + column
            entry = position // page_size
            if entry >= table.shape[1] or not 0 <= table[row, entry] < pool.key.shape[1]:
                continue
            for store, new in zip(stored, (key, value), strict=True):
                store[:, table[row, entry], position % page_size] = new[:, row, column]
    return stored


def check(pool, start, count, columns, rng):
    """Appends NaN in dead columns and compares every byte of the pool."""
    key, value = rng.normal(size=(2, LAYERS, len(start), columns, HEADS, DIM)).astype(np.float32)
    for row, live in enumerate(count):
        key[:, row, live:] = value[:, row, live:] = np.nan
    wanted = expected_append(pool, key, value, start, count)
    after = compiled_append(pool, key, value, jnp.int32(start), jnp.int32(count))
    np.testing.assert_array_equal(after.block_table, pool.block_table)
    for name, got, want in zip(("key", "value"), after[:2], wanted, strict=True):
        assert np.asarray(got).tobytes() == want.tobytes(), name
    return after


def test_columns_around_page_edges(rng):
    # Pages of 4; rows start one before, at and after an edge, and in the last page.
    table = [[7, 2, 9], [0, 11, 4], [5, 8, 1], [10, 3, 6]]
    pool = make_pool(12, 4, table, rng)
    check(pool, start=[3, 4, 5, 8], count=[5, 5, 3, 4], columns=5, rng=rng)
    check(pool, start=[0, 7, 8, 11], count=[5, 1, 4, 1], columns=5, rng=rng)


def test_rows_without_live_columns_touch_nothing(rng):
    # A padded row names live pages of others: it must not write, whatever its start says.
    pool = make_pool(6, 4, [[0, 1], [2, 3], [0, 1], [2, 3]], rng)
    check(pool, start=[2, 0, 3, 1], count=[4, 2, 0, 0], columns=5, rng=rng)
    untouched = check(pool, start=[0, 1, 7, 100], count=[0, 0, 0, 0], columns=5, rng=rng)
    assert np.asarray(untouched.key).tobytes() == np.asarray(pool.key).tobytes()


def test_columns_past_the_capacity_are_dropped(rng):
    # Two pages of 4 hold positions 0..7; the rest of the chunk must not land in the last page.
    pool = make_pool(5, 4, [[3, 1], [0, 2]], rng)
    assert pool.capacity == 8
    check(pool, start=[6, 8], count=[6, 6], columns=6, rng=rng)
    check(pool, start=[5, 1000], count=[3, 6], columns=6, rng=rng)


@pytest.mark.parametrize("absent", [-1, 6])
def test_unused_table_entries(rng, absent):
    # -1 would wrap to the last page of the pool, which row 1 owns; 6 is one past its end.
    pool = make_pool(6, 4, [[0, absent, absent], [5, 4, absent]], rng)
    check(pool, start=[0, 4], count=[4, 3], columns=6, rng=rng)
    check(pool, start=[2, 6], count=[6, 6], columns=6, rng=rng)  # reaches into absent pages


def test_chunks_add_up(rng):
    table = [[4, 0, 2], [1, 3, 5]]
    pool = make_pool(6, 4, table, rng)
    tokens = rng.normal(size=(2, LAYERS, 2, 12, HEADS, DIM)).astype(np.float32)
    whole = compiled_append(pool, *tokens, jnp.int32([0, 0]), jnp.int32([12, 9]))
    start = np.zeros(2, np.int32)
    for sizes in ([3, 0], [1, 4], [0, 1], [5, 3], [3, 1]):
        columns = np.full((2, LAYERS, 2, 5, HEADS, DIM), np.nan, np.float32)
        for row, size in enumerate(sizes):
            columns[:, :, row, :size] = tokens[:, :, row, start[row] : start[row] + size]
        pool = compiled_append(pool, *columns, jnp.asarray(start), jnp.int32(sizes))
        start += sizes
    np.testing.assert_array_equal(pool.key, whole.key)
    np.testing.assert_array_equal(pool.value, whole.value)


def test_init_gives_every_row_its_own_pages():
    pool = init_paged(2, 3, capacity=9, heads=1, head_dim=4, page_size=4, dtype=jnp.bfloat16)
    assert pool.capacity == 12 and pool.page_size == 4
    assert pool.key.dtype == pool.value.dtype == jnp.bfloat16
    assert not np.asarray(pool.key, np.float32).any()
    owned = np.asarray(pool.block_table).ravel()
    assert sorted(owned) == list(range(pool.key.shape[1]))


def test_a_pool_of_pages_that_no_row_owns(rng):
    """-1 everywhere: nothing that a row appends arrives anywhere."""
    pool = init_paged(LAYERS, 2, 9, HEADS, DIM, 4, jnp.float32, pages=5)
    assert pool.key.shape[1] == 5 and (np.asarray(pool.block_table) == -1).all()
    check(pool, start=[0, 3], count=[4, 4], columns=4, rng=rng)


def test_pages_are_copied_out_in_and_over(rng):
    """Ids outside the pool (-1 would be its last page, 6 clamps to it) change nothing."""
    pool = make_pool(6, 4, [[0, 1], [2, 3]], rng)
    pages = jnp.asarray([4, 1, 0])
    contents = read_pages(pool, pages)
    np.testing.assert_array_equal(contents.key, np.asarray(pool.key)[:, [4, 1, 0]])
    moved = write_pages(pool, jnp.asarray([2, -1, 6]), contents)
    expected = np.array(pool.value)
    expected[:, 2] = expected[:, 4]
    np.testing.assert_array_equal(moved.value, expected)
    copied = copy_page(pool, jnp.asarray(3), jnp.asarray(5))
    expected = np.array(pool.key)
    expected[:, 5] = expected[:, 3]
    np.testing.assert_array_equal(copied.key, expected)
    for outside in (-1, 6, 1000):
        same = copy_page(pool, jnp.asarray(3), jnp.asarray(outside))
        np.testing.assert_array_equal(same.key, pool.key)
