"""The op at real shapes."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.shapes import GEOMETRIES, Case, Draft
from pallas_kernels.sliding_window_attention.api import sliding_window_attention
from pallas_kernels.streamed_attention import counts


def _operands(key, draft: Draft, rows: int, dtype):
    keys = jax.random.split(key, 5)
    block = (rows, draft.columns, draft.kv_heads, draft.head_dim)
    ring = (draft.local_layers, rows, draft.window, draft.kv_heads, draft.head_dim)
    query = (rows, draft.columns, draft.heads, draft.head_dim)
    # In bfloat16 the ring holds its values in float16.
    value_dtype = jnp.float16 if dtype == jnp.bfloat16 else dtype
    return (
        jax.random.normal(keys[0], query, dtype),
        jax.random.normal(keys[1], block, dtype),
        jax.random.normal(keys[2], block, dtype),
        jax.random.normal(keys[3], ring, dtype),
        jax.random.normal(keys[4], ring, value_dtype),
        jnp.full(rows, 3 * draft.window + 2, jnp.int32),  # wrapped, and inside a tile
        jnp.full(rows, draft.columns, jnp.int32),
    )


def cases() -> Iterator[Case]:
    """Every geometry that has local layers, non-causal as published."""
    for geometry in GEOMETRIES:
        draft, dtype = geometry.draft, jnp.dtype(geometry.dtype)
        if not draft.local_layers:
            continue
        for rows in geometry.rows:
            minimum, moved, flops = counts(
                rows=rows,
                tokens=draft.columns,
                heads=draft.heads,
                kv_heads=draft.kv_heads,
                dim=draft.head_dim,
                itemsize=dtype.itemsize,
                context=draft.window - 1,
                capacity=draft.window - 1,
            )
            yield Case(
                op="sliding_window_attention",
                shape=f"{geometry.name} B={rows}",
                run=functools.partial(sliding_window_attention, layer=0),
                operands=functools.partial(_operands, draft=draft, rows=rows, dtype=dtype),
                minimum_bytes=minimum,
                moved_bytes=moved,
                flops=flops,
            )
