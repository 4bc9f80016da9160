"""The definition: one column after the other, only the chosen predecessor's energies."""

import jax
import jax.numpy as jnp


def candidate_selector(
    scores, candidates, projected, predecessor, successor, anchor, temperature, uniforms
):
    """See `api.candidate_selector`."""

    def walk(anchor, temperature, *columns):
        def step(token, column):
            scores, candidates, projected, uniform = column
            before = predecessor[token].astype(jnp.float32)
            after = successor[candidates].astype(jnp.float32)
            pair = jnp.sum(before * projected.astype(jnp.float32) * after, axis=-1)
            choice, law = _choose(scores.astype(jnp.float32) + pair, temperature, uniform)
            token = candidates[choice]
            return token, (token, choice, law)

        _, path = jax.lax.scan(step, anchor, columns)
        return path

    anchor, candidates = anchor.astype(jnp.int32), candidates.astype(jnp.int32)
    return jax.vmap(walk)(anchor, temperature, scores, candidates, projected, uniforms)


def _choose(energy, temperature, uniform):
    greedy = jnp.argmax(energy)
    # The best energy is subtracted before the division: E / T may overflow for a small T.
    positive = jnp.where(temperature > 0, temperature, 1.0)
    law = jax.nn.softmax((energy - jnp.max(energy)) / positive)

    # The smallest j whose cumulative mass exceeds the uniform, among candidates with mass.
    # Rounding may leave the whole sum at or below a uniform next to 1: then the last of them.
    possible = law > 0
    beyond = possible & (jnp.cumsum(law) > uniform)
    last = law.shape[0] - 1 - jnp.argmax(possible[::-1])
    drawn = jnp.where(jnp.any(beyond), jnp.argmax(beyond), last)

    choice = jnp.where(temperature > 0, drawn, greedy).astype(jnp.int32)
    one_hot = jax.nn.one_hot(greedy, law.shape[0], dtype=jnp.float32)
    return choice, jnp.where(temperature > 0, law, one_hot)
