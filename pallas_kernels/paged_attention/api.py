"""Attention of a full layer: a paged context plus the fresh block."""

import operator

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import check_heads, check_shape, choose
from pallas_kernels.paged_attention import pallas, reference, xla

_IMPLEMENTATIONS = {
    "pallas": pallas.paged_attention,
    "reference": reference.paged_attention,
    "xla": xla.paged_attention,
}
# One bit of a 32-bit mask per block column.
MAX_TREE_COLUMNS = 32


def paged_attention(
    q: Float[Array, "B T N D"],
    block_key: Float[Array, "B T K D"],
    block_value: Float[Array, "B T K D"],
    key_pages: Float[Array, "L P page K D"],
    value_pages: Float[Array, "L P page K D"],
    block_table: Int[Array, "B max_pages"],
    lengths: Int[Array, "B"],
    live: Int[Array, "B"],
    *,
    layer: int,
    causal: bool = True,
    ancestors: Int[Array, "B T"] | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N D"]:
    """Attends from a fresh block to everything committed before it and to itself.

    The context of row b is positions [0, lengths[b]); position p lies in page
    `block_table[b, p // page]`, slot p mod page. The block stands at lengths[b] + i and is
    passed in; this op writes no page.

    Args:
      q: queries; head h reads key head h // (N / K).
      block_key: keys of the block.
      block_value: values of the block.
      key_pages: the page pool; unreached slots and pages may hold anything.
      value_pages: likewise.
      block_table: page ids in order; entries beyond the used pages may be anything, -1 or P
        included.
      lengths: context length per row, at most max_pages * page.
      live: live columns per row, 0..T; columns from there on are dead: nobody sees their keys
        and their outputs are zero.
      layer: which layer of the pool.
      causal: whether a column sees only itself and the columns before it.
      ancestors: a tree instead of the causal rule, at most 32 columns: column c sees block
        column a where bit a of `ancestors[b, c]` is set. Bit c itself is set in every live
        column. The context is seen whole by every column.
      scale: factor on the scores; None is 1 / sqrt(D).
      implementation: None (best available), "xla", "pallas", "pallas_interpret" or "reference".
        The XLA form of a long table loops to the longest row and has no reverse-mode gradient;
        "reference" has.

    Returns:
      Attention output in `q.dtype`; softmax and sums in float32.

    Raises:
      ValueError: a shape does not fit, the layer does not exist, or the implementation is
        unknown or cannot run here; or `ancestors` has too many columns, is not of 32-bit
        integers, or comes with `causal=False`.

    References:
      Specification of DFlash, full layers; tree verification.
    """
    function = choose("paged_attention", _IMPLEMENTATIONS, implementation)
    rows, tokens, heads, dim = check_shape("q", q, (None, None, None, None))
    _, _, kv_heads, _ = check_shape("block_key", block_key, (rows, tokens, None, dim))
    check_heads(heads, kv_heads)
    check_shape("block_value", block_value, (rows, tokens, kv_heads, dim))
    check_shape("key_pages", key_pages, (None, None, None, kv_heads, dim))
    check_shape("value_pages", value_pages, key_pages.shape)
    check_shape("block_table", block_table, (rows, None))
    check_shape("lengths", lengths, (rows,))
    check_shape("live", live, (rows,))
    if ancestors is not None:
        _check_ancestors(ancestors, rows, tokens, causal)
    layer = operator.index(layer)
    if not 0 <= layer < key_pages.shape[0]:
        raise ValueError(f"layer: got {layer}, expected 0 <= layer < {key_pages.shape[0]}")
    return function(
        q,
        block_key,
        block_value,
        key_pages,
        value_pages,
        block_table,
        lengths,
        live,
        ancestors,
        layer=layer,
        causal=causal,
        scale=dim**-0.5 if scale is None else scale,
    )


def _check_ancestors(ancestors, rows: int, tokens: int, causal: bool) -> None:
    check_shape("ancestors", ancestors, (rows, tokens))
    if ancestors.dtype not in (jnp.int32, jnp.uint32):
        raise ValueError(f"ancestors: got {ancestors.dtype}, expected int32 or uint32")
    if tokens > MAX_TREE_COLUMNS:
        raise ValueError(
            f"ancestors: got {tokens} columns, expected at most {MAX_TREE_COLUMNS} (bits of a mask)"
        )
    if not causal:
        raise ValueError("causal: got False together with ancestors, which are the block's rule")
