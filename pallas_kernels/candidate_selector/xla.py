"""XLA form: choices for every possible predecessor at once, then a walk of table lookups."""

import jax
import jax.numpy as jnp


def candidate_selector(
    scores, candidates, projected, predecessor, successor, anchor, temperature, uniforms
):
    """See `api.candidate_selector`.

    The energies of all C predecessors of a column are one batched product, and so are their
    laws and choices. What is left to do in order is `choice = table[column, choice]`.
    """
    draft_tokens, ranks = scores.shape[1:]
    candidates = candidates.astype(jnp.int32)

    # [B, K, P]: the P = C possible predecessors of each column; the anchor, C times, for the
    # first. An id outside the codebook would read NaN, not somebody else's row.
    first = jnp.broadcast_to(anchor.astype(jnp.int32)[:, None, None], candidates[:, :1].shape)
    before = jnp.concatenate([first, candidates[:, :-1]], axis=1)
    before = predecessor.at[before].get(mode="fill", wrap_negative_indices=False)
    after = successor.at[candidates].get(mode="fill", wrap_negative_indices=False)
    gated = before.astype(jnp.float32) * projected.astype(jnp.float32)[:, :, None, :]
    energy = scores.astype(jnp.float32)[:, :, None, :] + jnp.einsum(
        "bkpr,bkcr->bkpc",
        gated,
        after.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )

    sampled = (temperature > 0)[:, None, None]
    rank = jnp.arange(ranks, dtype=jnp.int32)
    best = jnp.max(energy, axis=-1, keepdims=True)
    greedy = jnp.min(jnp.where(energy == best, rank, ranks - 1), axis=-1)
    # The best energy is subtracted before the division: E / T may overflow for a small T.
    weights = jnp.exp(
        (energy - best) / jnp.where(sampled, temperature[:, None, None], 1.0)[..., None]
    )
    law = weights / jnp.sum(weights, axis=-1, keepdims=True)
    # Cumulative sums as a product with a triangle: one dot.
    cumulative = jnp.einsum(
        "bkpc,cd->bkpd",
        law,
        jnp.triu(jnp.ones((ranks, ranks))),
        precision=jax.lax.Precision.HIGHEST,
    )
    # The first candidate with mass whose cumulative sum exceeds the uniform; rounding may leave
    # no such one for a uniform next to 1: then the last candidate with mass.
    possible = law > 0
    beyond = possible & (cumulative > uniforms[:, :, None, None])
    drawn = jnp.min(jnp.where(beyond, rank, ranks), axis=-1)
    last = jnp.max(jnp.where(possible, rank, 0), axis=-1)
    table = jnp.where(sampled, jnp.minimum(drawn, last), greedy)  # [B, K, P]

    choice = table[:, 0, 0]
    choices = [choice]
    for column in range(1, draft_tokens):
        choice = jnp.take_along_axis(table[:, column], choice[:, None], axis=1, mode="clip")[:, 0]
        choices.append(choice)
    choices = jnp.stack(choices, axis=1)

    previous = jnp.concatenate([jnp.zeros_like(choices[:, :1]), choices[:, :-1]], axis=1)
    law = jnp.take_along_axis(law, previous[:, :, None, None], axis=2, mode="clip")[:, :, 0]
    one_hot = (rank == choices[..., None]).astype(jnp.float32)
    q = jnp.where(sampled, law, one_hot)
    tokens = jnp.take_along_axis(candidates, choices[..., None], axis=2, mode="clip")[..., 0]
    return tokens, choices, q
