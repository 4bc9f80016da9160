"""The definition: every key carries its absolute position, one dense boolean mask."""

import jax
import jax.numpy as jnp


def sliding_window_attention(
    q, block_key, block_value, ring_key, ring_value, frontier, live, *, layer, causal, scale
):
    """See `api.sliding_window_attention`; plain float32."""
    rows, columns, heads, _ = q.shape
    slots = ring_key.shape[2]
    repeats = heads // block_key.shape[2]

    # The position that slot s holds: the newest p < F with p mod S = s; dead when negative.
    slot = jnp.arange(slots)
    last = frontier[:, None] - 1
    ring_position = last - jnp.mod(last - slot, slots)
    query_position = frontier[:, None] + jnp.arange(columns)
    column_live = jnp.arange(columns) < live[:, None]

    position = jnp.concatenate([ring_position, query_position], axis=1)
    alive = jnp.concatenate([ring_position >= 0, column_live], axis=1)
    value = jnp.concatenate(
        [ring_value[layer].astype(jnp.float32), block_value.astype(jnp.float32)], axis=1
    )
    key = jnp.concatenate(
        [ring_key[layer].astype(jnp.float32), block_key.astype(jnp.float32)], axis=1
    )
    key = jnp.where(alive[..., None, None], key, 0.0).repeat(repeats, axis=2)
    value = jnp.where(alive[..., None, None], value, 0.0).repeat(repeats, axis=2)

    distance = query_position[:, :, None] - position[:, None, :]
    near = (distance >= 0) if causal else (distance > -slots)
    allowed = near & (distance < slots) & alive[:, None, :]

    scores = jnp.einsum(
        "bwnd,bsnd->bnws", q.astype(jnp.float32), key, precision=jax.lax.Precision.HIGHEST
    )
    scores = jnp.where(allowed[:, None], scores * scale, -jnp.inf)
    # A dead column sees nothing when the whole row is dead: give it zeros, not 0 / 0.
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)
    output = jnp.einsum("bnws,bsnd->bwnd", weights, value, precision=jax.lax.Precision.HIGHEST)
    return jnp.where(column_live[..., None, None], output, 0.0).astype(q.dtype)
