"""The definition from the ring's side: which position does each slot hold afterwards?"""

import jax.numpy as jnp

from pallas_kernels.elementary import normed_key, represented


def context_kv_materialize(
    key, value, key_norm, ring_key, ring_value, frontier, live, *, eps, theta, rotary_dim
):
    """See `api.context_kv_materialize`."""
    columns, slots = key.shape[2], ring_key.shape[2]
    positions = frontier[:, None] + jnp.arange(columns)
    key = normed_key(key, key_norm[:, None, None, None, :], positions, eps, theta, rotary_dim)
    if ring_value.dtype == jnp.float16:
        value = represented(value, jnp.bfloat16)

    # Slot s holds the newest position p < F + live with p mod S = s; it is new when p >= F.
    last = (frontier + live)[:, None] - 1
    position = last - jnp.mod(last - jnp.arange(slots), slots)
    column = position - frontier[:, None]
    written = (column >= 0)[None, :, :, None, None]
    column = jnp.clip(column, 0, columns - 1)[None, :, :, None, None]
    new_key = jnp.take_along_axis(key, column, axis=2).astype(ring_key.dtype)
    new_value = jnp.take_along_axis(value, column, axis=2).astype(ring_value.dtype)
    return jnp.where(written, new_key, ring_key), jnp.where(written, new_value, ring_value)
