"""The op at real shapes."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.context_kv_materialize.api import context_kv_materialize
from pallas_kernels.shapes import GEOMETRIES, Case, Draft

_PREFILL = 512  # tokens of a chunk of the prompt


def _operands(key, draft: Draft, rows: int, columns: int, dtype):
    keys = jax.random.split(key, 5)
    projected = (draft.local_layers, rows, columns, draft.kv_heads, draft.head_dim)
    ring = (draft.local_layers, rows, draft.window, draft.kv_heads, draft.head_dim)
    # In bfloat16 the ring holds its values in float16.
    value_dtype = jnp.float16 if dtype == jnp.bfloat16 else dtype
    return (
        # Not rounded between projection and norm.
        jax.random.normal(keys[0], projected, jnp.float32),
        jax.random.normal(keys[1], projected, jnp.float32),
        jax.random.normal(keys[2], (draft.local_layers, draft.head_dim), dtype),
        jax.random.normal(keys[3], ring, dtype),
        jax.random.normal(keys[4], ring, value_dtype),
        jnp.full(rows, 3 * draft.window - 2, jnp.int32),  # wraps
        jnp.full(rows, columns, jnp.int32),
    )


def cases() -> Iterator[Case]:
    """One block of a round, and a chunk of a prompt."""
    for geometry in GEOMETRIES:
        draft, dtype = geometry.draft, jnp.dtype(geometry.dtype)
        if not draft.local_layers:
            continue
        for rows in geometry.rows:
            for label, columns in (("round", draft.columns), ("prefill", _PREFILL)):
                # Of a chunk longer than the ring only the last window is read and written.
                kept = rows * min(columns, draft.window)
                numbers = draft.local_layers * kept * draft.kv_heads * draft.head_dim
                angles = 2 * kept * draft.head_dim // 2 * 4
                yield Case(
                    op=f"context_kv_materialize.{label}",
                    shape=f"{geometry.name} B={rows}",
                    run=functools.partial(
                        context_kv_materialize, eps=1e-6, theta=1e7, rotary_dim=draft.head_dim
                    ),
                    operands=functools.partial(
                        _operands, draft=draft, rows=rows, columns=columns, dtype=dtype
                    ),
                    minimum_bytes=numbers * (2 * 4 + 2 * dtype.itemsize),
                    # A key is read twice, for itself and as its partner's partner; the angles
                    # are written once and read by every layer and head.
                    moved_bytes=(
                        numbers * (3 * 4 + 2 * dtype.itemsize)
                        + angles * (1 + 2 * draft.local_layers * draft.kv_heads)
                    ),
                    # Squares and their sum, gain and inverse root, two products and a sum.
                    flops=numbers * (2 + 2 + 3),
                    in_place=(3, 4),
                )
