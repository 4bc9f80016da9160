"""Writes projected context features into the draft's rings."""

from jaxtyping import Array, Float, Int

from pallas_kernels.context_kv_materialize import pallas, reference, xla
from pallas_kernels.dispatch import check_shape, choose
from pallas_kernels.triton_call import with_xla_gradient

_IMPLEMENTATIONS = {
    "reference": reference.context_kv_materialize,
    "xla": xla.context_kv_materialize,
    "pallas": with_xla_gradient(pallas.context_kv_materialize, xla.context_kv_materialize),
}


def context_kv_materialize(
    key: Float[Array, "L B T K D"],
    value: Float[Array, "L B T K D"],
    key_norm: Float[Array, "L D"],
    ring_key: Float[Array, "L B S K D"],
    ring_value: Float[Array, "L B S K D"],
    frontier: Int[Array, "B"],
    live: Int[Array, "B"],
    *,
    eps: float,
    theta: float,
    rotary_dim: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "L B S K D"], Float[Array, "L B S K D"]]:
    """Normalises and rotates raw context keys and stores both tensors in the rings.

    Column i stands at position F + i and goes to slot (F + i) mod S. Only live columns are
    written, and of those only the last S: a chunk longer than the ring leaves its final window.
    The caller's frontier still advances by `live`.

    Args:
      key: raw projected keys (best in float32: there is no cast before the norm).
      value: raw projected values.
      key_norm: gain of the head RMSNorm, per layer.
      ring_key: rings to write; donate them to update in place.
      ring_value: likewise. A float16 ring stores float16(bfloat16(value)), both roundings to
        nearest even; any other dtype a plain cast.
      frontier: F, position of column 0.
      live: live columns per row, 0..T; later columns may hold anything.
      eps: norm epsilon.
      theta: rotary base.
      rotary_dim: rotated dimensions of a head (D in every published draft).
      implementation: None (best available), "pallas", "pallas_interpret", "xla" or "reference".

    Returns:
      `(ring_key, ring_value)`; slots that are not written keep their bits.

    Raises:
      ValueError: a shape does not fit, or the implementation is unknown or unavailable.

    References:
      Specification of DFlash, context K/V and context rings.
    """
    function = choose("context_kv_materialize", _IMPLEMENTATIONS, implementation)
    layers, rows, _, kv_heads, dim = check_shape("key", key, (None,) * 5)
    check_shape("value", value, key.shape)
    check_shape("key_norm", key_norm, (layers, dim))
    check_shape("ring_key", ring_key, (layers, rows, None, kv_heads, dim))
    check_shape("ring_value", ring_value, ring_key.shape)
    check_shape("frontier", frontier, (rows,))
    check_shape("live", live, (rows,))
    if rotary_dim % 2 or not 0 < rotary_dim <= dim:
        raise ValueError(
            f"rotary_dim: got {rotary_dim}, expected an even number from 2 to {dim} (head dim)"
        )
    return function(
        key,
        value,
        key_norm,
        ring_key,
        ring_value,
        frontier,
        live,
        eps=eps,
        theta=theta,
        rotary_dim=rotary_dim,
    )
