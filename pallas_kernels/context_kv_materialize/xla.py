"""XLA form: one drop-mode scatter per ring, in place when the rings are donated."""

import jax.numpy as jnp

from pallas_kernels.elementary import normed_key, represented


def context_kv_materialize(
    key, value, key_norm, ring_key, ring_value, frontier, live, *, eps, theta, rotary_dim
):
    """See `api.context_kv_materialize`."""
    rows, columns = key.shape[1:3]
    slots = ring_key.shape[2]
    column = jnp.arange(columns)
    positions = frontier[:, None] + column
    key = normed_key(key, key_norm[:, None, None, None, :], positions, eps, theta, rotary_dim)
    if ring_value.dtype == jnp.float16:
        value = represented(value, jnp.bfloat16)

    # Each slot is written at most once: two live columns with one slot are S apart, and only
    # the later of them is among the last S. Anything else goes to slot S, which is dropped
    # (never -1, which would wrap to the last slot).
    written = (column < live[:, None]) & (column >= live[:, None] - slots)
    slot = jnp.where(written, positions % slots, slots)
    row = jnp.arange(rows)[:, None]

    def scatter(ring, new):
        return ring.at[:, row, slot].set(new.astype(ring.dtype), mode="drop")

    return scatter(ring_key, key), scatter(ring_value, value)
