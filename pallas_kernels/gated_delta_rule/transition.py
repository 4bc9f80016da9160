"""The one transition of the gated delta rule; verify, Fold and the reference all call it.

Layouts: state `[..., Hv, Dk, Dv]` float32 (the Hugging Face cache layout), key and query raw
`[..., Hk, Dk]`, value `[..., Hv, Dv]`, log decay g and beta `[..., Hv]`.

The functions take their `total`, the sum over a head dimension, as an argument: a compiled kernel
has a reduction of its own, whose order follows from the shape of its tile alone.

References: Gated Delta Networks (Yang et al., 2024), section 3.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

L2_EPS = 1e-6


Sum = Callable[[jax.Array, int], jax.Array]  # (x, axis) -> sum over axis, kept as 1


def ordered_sum(x: jax.Array, axis: int) -> jax.Array:
    """Sum over `axis`, kept as 1, by adding halves: (x0 + x2) + (x1 + x3) for four elements.

    XLA's reduction chooses its order, on CPU even the library that runs it, by the shape of the
    operand, and verify's `[B, ...]` and Fold's `[L, B, ...]` then part in the last bit (measured
    with jax 0.10.2). Elementwise additions leave it no choice, and cost no more.
    """
    while (size := x.shape[axis]) > 1:
        half = size // 2
        first, second, odd = jnp.split(x, [half, 2 * half], axis)
        x = first + second if size % 2 == 0 else jnp.concatenate([first + second, odd], axis)
    return x


def l2_normalise(x: jax.Array, total: Sum = ordered_sum) -> jax.Array:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(total(x * x, -1) + L2_EPS)


def per_value_head(x: jax.Array, value_heads: int) -> jax.Array:
    """`[..., Hk, D] -> [..., Hv, D]`: value head j reads key head `j // (Hv / Hk)`."""
    return jnp.repeat(x, value_heads // x.shape[-2], axis=-2)


class Column(NamedTuple):
    """What one token does to the state, ready for `transition`; any leading axes.

    key_hat `[..., Hv, Dk]` normalised, per value head; value `[..., Hv, Dv]`; decay = exp(g) and
    beta `[..., Hv]`; all float32.
    """

    key_hat: jax.Array
    value: jax.Array
    decay: jax.Array
    beta: jax.Array


def make_columns(key: jax.Array, value: jax.Array, g: jax.Array, beta: jax.Array) -> Column:
    """Column of raw keys `[..., Hk, Dk]` and values; verify and Fold both start from it."""
    key_hat = per_value_head(l2_normalise(key), value.shape[-2])
    return Column(key_hat, value.astype(jnp.float32), jnp.exp(g), beta)


def transition(state: jax.Array, column: Column, total: Sum = ordered_sum) -> jax.Array:
    """One token: the next state `[..., Hv, Dk, Dv]`; without the head axis for a single head."""
    key_hat, value, decay, beta = column
    decayed = decay[..., None, None] * state
    # The error is read from the already decayed state.
    error = value - total(decayed * key_hat[..., :, None], -2).squeeze(-2)
    update = beta[..., None] * error
    return decayed + key_hat[..., :, None] * update[..., None, :]


def read(
    state: jax.Array,
    query_hat: jax.Array,
    total: Sum = ordered_sum,
    key_dim: int | None = None,
) -> jax.Array:
    """`S q / sqrt(Dk)`: output `[..., Hv, Dv]` of normalised queries `[..., Hv, Dk]`.

    `key_dim` is the Dk meant where a kernel has padded its tiles with zeros.
    """
    scale = (key_dim or query_hat.shape[-1]) ** -0.5
    return total(state * query_hat[..., :, None], -2).squeeze(-2) * scale
