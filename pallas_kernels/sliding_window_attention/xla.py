"""XLA form: reads the ring where it lies, in slot order, under a mask made from slot ages."""

import jax.numpy as jnp

from pallas_kernels.grouped_attention import grouped_attention


def sliding_window_attention(
    q, block_key, block_value, ring_key, ring_value, frontier, live, *, layer, causal, scale
):
    """See `api.sliding_window_attention`."""
    columns, slots = q.shape[1], ring_key.shape[2]
    column = jnp.arange(columns)

    # Age of the position in slot s: 0 for F - 1, 1 for F - 2, ... With S = 4 and F = 9 the
    # slots 0 1 2 3 hold positions 8 5 6 7, ages 0 3 2 1. A slot is live while age < F.
    age = (frontier[:, None] - 1 - jnp.arange(slots)) % slots
    ring_live = age < frontier[:, None]
    # Column i is age + 1 + i away from it; the ring lies wholly in the past, so that causality
    # makes no difference here.
    ring_mask = ring_live[:, None, :] & (age[:, None, :] + column[:, None] + 1 < slots)

    distance = column[:, None] - column
    near = (distance < slots) & ((distance >= 0) if causal else (distance > -slots))
    block_live = column < live[:, None]
    return grouped_attention(
        q,
        ring_key[layer],
        ring_value[layer],
        block_key,
        block_value,
        context_live=ring_live,
        context_mask=ring_mask,
        block_live=block_live,
        block_mask=near & block_live[:, None, :],
        scale=scale,
    )
