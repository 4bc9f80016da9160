"""Pallas-Triton form: norm, rotation and ring scatter of keys and values in one pass, in place."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.elementary import rotary_tables
from pallas_kernels.triton_call import bfloat16_rounded, load, padded_size, store, triton_call

_TILE = 16  # vectors (a head of a column) per program


def _kernel(
    key, value, key_norm, cos, sin, frontier, live, _key, _value, ring_key, ring_value, *, eps
):
    # key, value [L, B, T, K, D]; key_norm [L, D]; cos, sin [B, T, half]; frontier, live [B]
    # ring_key, ring_value [L, B, S, K, D]: one buffer each with _key and _value
    del _key, _value
    kv_heads, dim = key.shape[3:]
    slots, half = ring_key.shape[2], cos.shape[2]
    layer, row = pl.program_id(2), pl.program_id(1)
    vector = pl.program_id(0) * _TILE + jnp.arange(_TILE)
    column, head = vector // kv_heads, vector % kv_heads
    count = live[row]
    # Of the live columns only the last `slots`: any slot is written once.
    written = (column < count) & (column >= count - slots)
    # The others point past the ring: see `store`.
    slot = jnp.where(written, (frontier[row] + column) % slots, slots)

    first, last = pl.program_id(0) * _TILE, (pl.program_id(0) + 1) * _TILE
    wanted = (first < count * kv_heads) & (last > (count - slots) * kv_heads)

    @pl.when(wanted)  # a tile of dead columns reads nothing
    def _():
        channel = jnp.arange(padded_size(dim))
        at = (layer, row, column[:, None], head[:, None])
        to = (layer, row, slot[:, None], head[:, None], channel[None, :])
        on = written[:, None] & (channel < dim)[None, :]

        raw = load(value, (*at, channel[None, :]), on).astype(jnp.float32)
        if ring_value.dtype == jnp.float16:
            raw = bfloat16_rounded(raw)
        store(ring_value, to, raw.astype(ring_value.dtype), on)

        raw = load(key, (*at, channel[None, :]), on).astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.sum(raw * raw, axis=1, keepdims=True) / dim + eps)

        # Channel c < half pairs with c + half: c' = c cos - partner sin; the partner's own line
        # has the other sign. A value cannot be permuted in registers: the partner is read again.
        partner = jnp.where(channel < half, channel + half, channel - half)
        rotated = channel < 2 * half
        pair = load(key, (*at, partner[None, :]), on & rotated[None, :]).astype(jnp.float32)
        gain = load(key_norm, (layer, channel), channel < dim).astype(jnp.float32)
        pair_gain = load(key_norm, (layer, partner), rotated).astype(jnp.float32)
        pair_gain = jnp.where(channel < half, -pair_gain, pair_gain)

        angle = (row, column[:, None], jnp.where(channel < half, channel, channel - half)[None, :])
        cosine = load(cos, angle, on & rotated[None, :], 1.0)
        sine = load(sin, angle, on & rotated[None, :])
        normed = gain[None, :] * (raw * inverse)
        turned = normed * cosine + pair_gain[None, :] * (pair * inverse) * sine
        store(ring_key, to, turned.astype(ring_key.dtype), on)


def context_kv_materialize(
    key,
    value,
    key_norm,
    ring_key,
    ring_value,
    frontier,
    live,
    *,
    eps,
    theta,
    rotary_dim,
    interpret=False,
):
    """See `api.context_kv_materialize`."""
    layers, rows, columns, kv_heads, _ = key.shape
    # Angles once for all layers and heads, by the same function as in every other form.
    positions = frontier[:, None] + jnp.arange(columns)
    cos, sin = rotary_tables(positions, theta, rotary_dim)
    return triton_call(
        functools.partial(_kernel, eps=eps),
        name="context_kv_materialize",
        out_shape=(
            jax.ShapeDtypeStruct(ring_key.shape, ring_key.dtype),
            jax.ShapeDtypeStruct(ring_value.shape, ring_value.dtype),
        ),
        grid=(pl.cdiv(columns * kv_heads, _TILE), rows, layers),
        operands=(key, value, key_norm, cos, sin, frontier, live, ring_key, ring_value),
        num_warps=4,
        aliases={7: 0, 8: 1},
        interpret=interpret,
    )
