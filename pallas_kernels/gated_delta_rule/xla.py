"""XLA form: two loops over the shared transition, and the chunked rule for prefill."""

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_rule.transition import (
    l2_normalise,
    make_columns,
    per_value_head,
    read,
    transition,
)

CHUNK = 64
_BASE = 8
_CHUNKS = (8, 16, 32, CHUNK)  # a short call uses the smallest that holds it


def _at(x, i):
    """`x[i]` of a loop counter: in range, so without the checks that indexing compiles to."""
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False, allow_negative_indices=False)


def verify(query, key, value, g, beta, state, live, *, layer):
    """See `api.verify`. The committed state enters and is not returned.

    Runs `max(live)` steps, like Fold: a scan over a single column would be inlined into its
    surroundings, and there the sums of `transition` were rounded otherwise (CPU, jax 0.10.2).
    """
    query_hat = per_value_head(l2_normalise(query), value.shape[2])
    columns, queries = jax.tree.map(
        lambda x: jnp.moveaxis(x, 1, 0), (make_columns(key, value, g, beta), query_hat)
    )

    def step(i, carry):
        state, outputs = carry
        state = transition(state, jax.tree.map(lambda x: _at(x, i), columns))
        output = read(state, _at(queries, i))
        start = (i,) + (0,) * output.ndim
        return state, jax.lax.dynamic_update_slice(
            outputs, output[None], start, allow_negative_indices=False
        )

    outputs = jnp.zeros((value.shape[1], value.shape[0], *value.shape[2:]), jnp.float32)
    _, outputs = jax.lax.fori_loop(0, jnp.max(live), step, (state[layer], outputs))
    outputs = jnp.moveaxis(outputs, 0, 1)
    on = jnp.arange(value.shape[1]) < live[:, None]
    return jnp.where(on[:, :, None, None], outputs, 0.0)


def fold(state, key, value, g, beta, count):
    """See `api.fold`. Runs `max(count)` steps; columns past a row's count are discarded."""
    columns = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), make_columns(key, value, g, beta))

    def step(i, state):
        stepped = transition(state, jax.tree.map(lambda x: _at(x, i), columns))
        return jnp.where((i < count)[:, None, None, None], stepped, state)

    return jax.lax.fori_loop(0, jnp.max(count), step, state)


def _unit_lower_inverse(strict: jax.Array) -> jax.Array:
    """`(I + A)^-1` of strictly lower triangular `A [..., n, n]`, n = 8 times a power of two.

    Diagonal blocks of 8 by `(I - A)(I + A^2)(I + A^4)`, exact since A^8 = 0 and harmless in
    float32 (powers grow at most like binomials of 8); then blocks double:
    `[[X, 0], [-Y B X, Y]]` inverts `[[X^-1, 0], [B, Y^-1]]`. Matrix products only, so it
    differentiates and runs the same everywhere.
    """
    size = strict.shape[-1]
    lead, strict = strict.shape[:-2], strict.reshape(-1, size, size)

    def diagonal_blocks(width):  # [M, size / width, width, width]; slices, no transpose
        spans = [slice(start, start + width) for start in range(0, size, width)]
        return jnp.stack([strict[:, span, span] for span in spans], axis=1)

    width = min(_BASE, size)
    block, eye = diagonal_blocks(width), jnp.eye(width)
    square = block @ block
    inverse = (eye - block) @ (eye + square) @ (eye + square @ square)
    while width < size:
        below = diagonal_blocks(2 * width)[..., width:, :width]
        upper, lower = inverse[:, 0::2], inverse[:, 1::2]
        corner = -(lower @ below @ upper)
        top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, lower], axis=-1)], axis=-2)
        width *= 2
    return inverse.reshape(*lead, size, size)


def prefill(query, key, value, g, beta, state, live):
    """See `api.prefill`.

    Within a chunk, with G the running sum of g, the updates u solve
    `(I + A) U = beta (V - exp(G) K S0)`, `A[t, s] = beta_t exp(G_t - G_s) k_t.k_s` for s < t:
    one triangular inverse per chunk outside the scan, matrix products inside
    (Yang et al., 2024, section 3.3). Dead tokens get g = 0 and beta = 0 and so leave no trace.
    """
    batch, tokens, value_heads, value_dim = value.shape
    chunk = next(c for c in _CHUNKS if c >= tokens or c == CHUNK)
    padding = -tokens % chunk
    on = (jnp.arange(tokens) < live[:, None])[..., None]

    def arrange(x):  # [B, T, Hv, ...] -> [chunks, B, Hv, chunk, ...], dead tokens zero
        x = jnp.where(on[..., None] if x.ndim == 4 else on, x.astype(jnp.float32), 0.0)
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(batch, -1, chunk, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 3, 2)

    scale = query.shape[-1] ** -0.5
    query_hat = arrange(per_value_head(l2_normalise(query), value_heads) * scale)
    key_hat = arrange(per_value_head(l2_normalise(key), value_heads))
    value, g, beta = arrange(value), arrange(g), arrange(beta)

    total = jnp.cumsum(g, axis=-1)
    lower = jnp.tril(jnp.ones((chunk, chunk), bool))
    gap = jnp.where(lower, total[..., :, None] - total[..., None, :], 0.0)
    decay = jnp.where(lower, jnp.exp(gap), 0.0)
    keys = jnp.einsum("...td,...sd->...ts", key_hat, key_hat)
    system = beta[..., None] * keys * decay  # the unit diagonal is implied below
    right = jnp.concatenate([value, jnp.exp(total)[..., None] * key_hat], -1) * beta[..., None]
    solved = _unit_lower_inverse(jnp.where(jnp.tri(chunk, k=-1, dtype=bool), system, 0.0)) @ right
    fresh, carried = solved[..., :value_dim], solved[..., value_dim:]
    scores = jnp.einsum("...td,...sd->...ts", query_hat, key_hat) * decay
    query_in = jnp.exp(total)[..., None] * query_hat
    key_out = jnp.exp(total[..., -1:] - total)[..., None] * key_hat
    chunk_decay = jnp.exp(total[..., -1])[..., None, None]

    def step(state, xs):
        fresh, carried, scores, query_in, key_out, chunk_decay = xs
        update = fresh - carried @ state
        output = query_in @ state + scores @ update
        return chunk_decay * state + jnp.swapaxes(key_out, -1, -2) @ update, output

    state, outputs = jax.lax.scan(
        step, state, (fresh, carried, scores, query_in, key_out, chunk_decay)
    )
    outputs = jnp.moveaxis(outputs, 0, 1)  # [B, chunks, Hv, chunk, Dv]
    outputs = jnp.moveaxis(outputs, 2, 3).reshape(batch, -1, value_heads, value_dim)
    return outputs[:, :tokens], state
