"""The op at real shapes."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.shapes import GEOMETRIES, Case
from pallas_kernels.streamed_attention import counts

_TREE_COLUMNS = 16  # a tree of the width that pays at batch 1


def _operands(key, *, rows, tokens, heads, kv_heads, dim, context, layers, page, dtype, tree):
    keys = jax.random.split(key, 6)
    per_row = context // page
    block = (rows, tokens, kv_heads, dim)
    # All layers are in one pool, whose offsets may then need 64 bits.
    pool = (layers, rows * per_row, page, kv_heads, dim)
    table = jax.random.permutation(keys[5], rows * per_row).reshape(rows, per_row)
    operands = (
        jax.random.normal(keys[0], (rows, tokens, heads, dim), dtype),
        jax.random.normal(keys[1], block, dtype),
        jax.random.normal(keys[2], block, dtype),
        jax.random.normal(keys[3], pool, dtype),
        jax.random.normal(keys[4], pool, dtype),
        table.astype(jnp.int32),
        jnp.full(rows, context, jnp.int32),
        jnp.full(rows, tokens, jnp.int32),
    )
    if not tree:
        return operands
    # A chain of half the columns; the others hang on the anchor.
    column = jnp.arange(tokens)
    chain = (1 << (column + 1)) - 1
    masks = jnp.where(column < tokens // 2, chain, 1 | (1 << column))
    return (*operands, jnp.broadcast_to(masks, (rows, tokens)).astype(jnp.int32))


def _run(*operands, causal, implementation=None):
    arrays, ancestors = operands[:8], (operands[8] if len(operands) > 8 else None)
    layer = arrays[3].shape[0] - 1
    return paged_attention(
        *arrays, layer=layer, causal=causal, ancestors=ancestors, implementation=implementation
    )


def _case(geometry, label, rows, tokens, model, causal=True, tree=False) -> Case:
    dtype = jnp.dtype(geometry.dtype)
    shape = dict(
        rows=rows,
        tokens=tokens,
        heads=model.heads,
        kv_heads=model.kv_heads,
        dim=model.head_dim,
        context=geometry.context,
    )
    minimum, moved, flops = counts(**shape, itemsize=dtype.itemsize, capacity=geometry.context)
    return Case(
        op=f"paged_attention.{label}",
        shape=f"{geometry.name} B={rows}",
        run=functools.partial(_run, causal=causal),
        operands=functools.partial(
            _operands,
            **shape,
            layers=model.full_layers,
            page=geometry.page,
            dtype=dtype,
            tree=tree,
        ),
        minimum_bytes=minimum,
        moved_bytes=moved,
        flops=flops,
    )


def cases() -> Iterator[Case]:
    """Verify of a chain and of a tree, plain decoding, and the draft's full layers."""
    for geometry in GEOMETRIES:
        draft, target = geometry.draft, geometry.target
        for rows in geometry.rows:
            yield _case(geometry, "verify", rows, draft.columns, target)
            yield _case(geometry, "decode", rows, 1, target)
            if draft.selector_rank:  # trees are drawn from DFlash2's lattice
                yield _case(geometry, "tree", rows, _TREE_COLUMNS, target, tree=True)
            if draft.full_layers:
                yield _case(geometry, "draft", rows, draft.columns, draft, causal=False)
