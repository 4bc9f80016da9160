"""Draft attention of a local layer: the live interval of a ring plus the block itself."""

import operator

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import check_heads, check_shape, choose
from pallas_kernels.sliding_window_attention import pallas, reference, xla

_IMPLEMENTATIONS = {
    "pallas": pallas.sliding_window_attention,
    "reference": reference.sliding_window_attention,
    "xla": xla.sliding_window_attention,
}


def sliding_window_attention(
    q: Float[Array, "B W N D"],
    block_key: Float[Array, "B W K D"],
    block_value: Float[Array, "B W K D"],
    ring_key: Float[Array, "L B S K D"],
    ring_value: Float[Array, "L B S K D"],
    frontier: Int[Array, "B"],
    live: Int[Array, "B"],
    *,
    layer: int,
    causal: bool = False,
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B W N D"]:
    """Attends from a block at positions F..F+W-1 to the ring's live interval and the block.

    The ring keeps absolute position p in slot p mod S; positions [max(0, F - S), F) are live.
    The window is S, the number of slots: a query at p_q sees a key at p_k when
    `|p_q - p_k| < S`, or `0 <= p_q - p_k < S` when causal. Example with S = 4, F = 9 and five
    columns, non-causal: column 0 (position 9) sees 6..12, column 2 sees 8..13.

    Args:
      q: rotated queries; head h reads key head h // (N / K).
      block_key: rotated keys of the block, column i at position F + i.
      block_value: values of the block.
      ring_key: all layers' rings; dead slots may hold anything.
      ring_value: likewise.
      frontier: F, the number of context positions each row has seen.
      live: live columns per row, 0..W; columns from there on are dead: nobody sees their keys
        and their outputs are zero.
      layer: which ring.
      causal: whether a column sees only itself and what comes before it.
      scale: factor on the scores; None is 1 / sqrt(D).
      implementation: None (best available), "xla", "pallas", "pallas_interpret" or "reference".

    Returns:
      Attention output in `q.dtype`; softmax and sums in float32.

    Raises:
      ValueError: a shape does not fit, the layer does not exist, or the implementation is
        unknown or cannot run here.

    References:
      Specification of DFlash, local layers and context rings.
    """
    function = choose("sliding_window_attention", _IMPLEMENTATIONS, implementation)
    rows, columns, heads, dim = check_shape("q", q, (None, None, None, None))
    _, _, kv_heads, _ = check_shape("block_key", block_key, (rows, columns, None, dim))
    check_heads(heads, kv_heads)
    check_shape("block_value", block_value, (rows, columns, kv_heads, dim))
    check_shape("ring_key", ring_key, (None, rows, None, kv_heads, dim))
    check_shape("ring_value", ring_value, ring_key.shape)
    check_shape("frontier", frontier, (rows,))
    check_shape("live", live, (rows,))
    layer = operator.index(layer)
    if not 0 <= layer < ring_key.shape[0]:
        raise ValueError(f"layer: got {layer}, expected 0 <= layer < {ring_key.shape[0]}")
    return function(
        q,
        block_key,
        block_value,
        ring_key,
        ring_value,
        frontier,
        live,
        layer=layer,
        causal=causal,
        scale=dim**-0.5 if scale is None else scale,
    )
