"""Small functions that several ops and the layers above them share.

Letters: B rows, W block columns, T tokens, N query heads, K key/value heads, D head dimension,
V vocabulary, L layers.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def rms_norm(
    x: Float[Array, "... H"], weight: Float[Array, "... H"], eps: float
) -> Float[Array, "... H"]:
    """Plain RMSNorm `weight * x / sqrt(mean(x^2) + eps)` over the last axis.

    Args:
      x: input of any floating dtype.
      weight: gain, used as it is (no `1 + weight`); broadcasts against `x`.
      eps: added to the mean of squares.

    Returns:
      The normalised input, computed in float32 and cast back to `x.dtype`.
    """
    return _rms_norm_f32(x, weight, eps).astype(x.dtype)


def _rms_norm_f32(x: Array, weight: Array, eps: float) -> Array:
    x = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return weight.astype(jnp.float32) * (x * inverse)


def rotary_tables(
    positions: Int[Array, "..."], theta: float, rotary_dim: int
) -> tuple[Float[Array, "... half"], Float[Array, "... half"]]:
    """Cosines and sines of `position * theta**(-2i / rotary_dim)`.

    Args:
      positions: absolute positions, any shape.
      theta: rotary base.
      rotary_dim: even number of rotated dimensions.

    Returns:
      Float32 `(cos, sin)`, each `positions.shape + (rotary_dim // 2,)`.
    """
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ValueError(f"rotary_dim: got {rotary_dim}, expected a positive even number")
    # In float64 on the host: rounded once, and a constant instead of `pow` on the device.
    inverse_frequency = np.float64(theta) ** -(np.arange(0, rotary_dim, 2) / rotary_dim)
    inverse_frequency = jnp.asarray(inverse_frequency, jnp.float32)
    angles = positions.astype(jnp.float32)[..., None] * inverse_frequency
    return jnp.cos(angles), jnp.sin(angles)


def apply_rotary(
    x: Float[Array, "... heads D"],
    cos: Float[Array, "... half"],
    sin: Float[Array, "... half"],
) -> Float[Array, "... heads D"]:
    """Rotates the first `2 * half` dimensions of every head, split-half pairing.

    Dimension `i` is paired with `i + half` (not with its neighbour); dimensions from `2 * half`
    on pass unchanged.

    Args:
      x: queries or keys.
      cos: table of `rotary_tables`, without a head axis; broadcast over heads.
      sin: likewise.

    Returns:
      `x` rotated in float32 and cast back to `x.dtype`.
    """
    half = cos.shape[-1]
    if 2 * half > x.shape[-1]:
        raise ValueError(
            f"cos: got {half} frequencies for a head of {x.shape[-1]} dimensions, expected at "
            f"most {x.shape[-1] // 2}"
        )
    cos, sin = cos[..., None, :], sin[..., None, :]
    x32 = x.astype(jnp.float32)
    first, second = x32[..., :half], x32[..., half : 2 * half]
    rotated = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < x.shape[-1]:
        rotated.append(x32[..., 2 * half :])
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def normed_key(
    key: Float[Array, "... heads D"],
    key_norm: Float[Array, "... D"],
    positions: Int[Array, "..."],
    eps: float,
    theta: float,
    rotary_dim: int | None = None,
) -> Float[Array, "... heads D"]:
    """Context key of the draft: head RMSNorm of the raw projection, then rotary.

    There is no cast between the projection, the norm and the rotation (specification, draft
    context), so the result is float32; the caller casts when it stores.

    Args:
      key: raw projected key.
      key_norm: gain over the head dimension; broadcasts against `key`.
      positions: absolute position of each token; broadcasts against `key.shape[:-2]`.
      eps: norm epsilon.
      theta: rotary base.
      rotary_dim: rotated dimensions; None rotates the whole head.

    Returns:
      Float32, shape of `key`.
    """
    rotary_dim = key.shape[-1] if rotary_dim is None else rotary_dim
    cos, sin = rotary_tables(positions, theta, rotary_dim)
    return apply_rotary(_rms_norm_f32(key, key_norm, eps), cos, sin)


def stable_top_k(
    logits: Float[Array, "... V"], k: int
) -> tuple[Float[Array, "... k"], Int[Array, "... k"]]:
    """The `k` largest logits in descending order; equal logits by ascending id.

    Args:
      logits: scores over the vocabulary.
      k: how many, 1 <= k <= V.

    Returns:
      `(scores, ids)`; scores keep the dtype of `logits`, ids are int32.
    """
    vocabulary = logits.shape[-1]
    if not 1 <= k <= vocabulary:
        raise ValueError(f"k: got {k}, expected 1 <= k <= {vocabulary} (last axis of logits)")
    # XLA's TopK is a stable sort: ties come out in index order (pinned by a test). It orders
    # +0 above -0, though, which are equal logits, so every zero is made positive first.
    logits = jnp.where(logits == 0, jnp.zeros((), logits.dtype), logits)
    scores, ids = jax.lax.top_k(logits, k)
    # Without the barrier a caller's slice of the shortlist merges into the slice inside TopK, XLA
    # no longer sees a TopK, and sorts the whole vocabulary (1 ms instead of 10 us on a CPU).
    return jax.lax.optimization_barrier((scores, ids.astype(jnp.int32)))


def represented(x: Float[Array, "..."], dtype) -> Float[Array, "..."]:
    """Casts so that the rounding really happens.

    Under jit XLA may drop a float32 -> bfloat16 -> float32 (or -> float16) pair as harmless
    excess precision. Where a contract says that the next step consumes the bfloat16 value,
    `reduce_precision`, which XLA keeps, does the rounding.
    """
    if jnp.dtype(dtype) == jnp.bfloat16 and x.dtype != jnp.bfloat16:
        x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)
