"""Paged key/value store of the full-attention layers: a pool, a block table, pure functions.

Page ownership is the caller's: a row's block table names its pages in order, and a page has at
most one row that writes to it. -1 names no page: nothing is written there, and what is read has
no meaning.
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
    layers: int,
    rows: int,
    capacity: int,
    heads: int,
    head_dim: int,
    page_size: int,
    dtype: DType,
    pages: int | None = None,
) -> PagedKV:
    """A pool whose rows can hold `capacity` positions each.

    Args:
      pages: of the pool, and no row names one yet (-1). None gives every row
        `ceil(capacity / page_size)` pages of its own.
    """
    per_row = -(-capacity // page_size)
    if pages is None:
        pages = rows * per_row
        table = jnp.arange(pages, dtype=jnp.int32).reshape(rows, per_row)
    else:
        table = jnp.full((rows, per_row), -1, jnp.int32)
    shape = (layers, pages, page_size, heads, head_dim)
    return PagedKV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), table)


class Pages(NamedTuple):
    """Contents of N pages outside a pool: key, value `[L, N, page_size, K, D]`."""

    key: Float[Array, "L N page K D"]
    value: Float[Array, "L N page K D"]


def read_pages(pool: PagedKV, pages: Int[Array, "N"]) -> Pages:
    """Copies pages out; ids outside the pool give pages of no meaning."""
    index = jnp.clip(pages, 0, pool.key.shape[1] - 1)
    return Pages(pool.key[:, index], pool.value[:, index])


def write_pages(pool: PagedKV, pages: Int[Array, "N"], contents: Pages) -> PagedKV:
    """Copies contents into pages; those with an id outside the pool go nowhere."""
    total = pool.key.shape[1]
    index = jnp.where((pages >= 0) & (pages < total), pages, total)  # -1 would be the last page
    return pool._replace(
        key=pool.key.at[:, index].set(contents.key, mode="drop"),
        value=pool.value.at[:, index].set(contents.value, mode="drop"),
    )


def copy_page(pool: PagedKV, source: Int[Array, ""], target: Int[Array, ""]) -> PagedKV:
    """Copies one page onto another; nothing where the target lies outside the pool."""
    return write_pages(pool, target[None], read_pages(pool, source[None]))


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
