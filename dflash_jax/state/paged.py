"""Paged key/value store of the full-attention layers: a pool, a block table, pure functions.

Page ownership is the caller's: a row's block table names its pages in order, and two rows name
the same page only when neither writes to it.
"""

from typing import NamedTuple

import jax.numpy as jnp

from dflash_jax.typing import Array, DType, Float, Int


class PagedKV(NamedTuple):
    """key, value `[L, pages, page_size, K, D]`; block_table `[B, max_pages]`.

    Position p of row b lives in page `block_table[b, p // page_size]`, slot `p % page_size`.
    """

    key: Float[Array, "L P page K D"]
    value: Float[Array, "L P page K D"]
    block_table: Int[Array, "B pages"]

    @property
    def page_size(self) -> int:
        return self.key.shape[2]

    @property
    def capacity(self) -> int:
        """Positions a row can hold."""
        return self.block_table.shape[1] * self.page_size


def init_paged(
    layers: int, rows: int, capacity: int, heads: int, head_dim: int, page_size: int, dtype: DType
) -> PagedKV:
    """A pool in which every row owns `ceil(capacity / page_size)` pages of its own."""
    per_row = -(-capacity // page_size)
    shape = (layers, rows * per_row, page_size, heads, head_dim)
    table = jnp.arange(rows * per_row, dtype=jnp.int32).reshape(rows, per_row)
    return PagedKV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), table)


def append(
    pool: PagedKV,
    key: Float[Array, "L B T K D"],
    value: Float[Array, "L B T K D"],
    start: Int[Array, "B"],
    count: Int[Array, "B"],
) -> PagedKV:
    """Stores columns `i < count[b]` at positions `start[b] + i`; the others write nothing."""
    pages = pool.key.shape[1]
    column = jnp.arange(key.shape[2])
    position = start[:, None] + column
    entry = jnp.minimum(position // pool.page_size, pool.block_table.shape[1] - 1)
    page = jnp.take_along_axis(pool.block_table, entry, axis=1)
    # A dead column, one past the row's capacity or one whose table entry names no page gets a
    # page that does not exist; a negative one would wrap to the end of the pool.
    live = (column < count[:, None]) & (position < pool.capacity) & (page >= 0)
    page = jnp.where(live, page, pages)
    slot = position % pool.page_size
    return pool._replace(
        key=pool.key.at[:, page, slot].set(key.astype(pool.key.dtype), mode="drop"),
        value=pool.value.at[:, page, slot].set(value.astype(pool.value.dtype), mode="drop"),
    )
