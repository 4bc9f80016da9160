"""Definition of the gated delta rule: one token after the other, nothing else."""

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_rule.transition import (
    l2_normalise,
    make_columns,
    per_value_head,
    read,
    transition,
)


def prefill(query, key, value, g, beta, state, live):
    """Token-by-token run that stops at `live[b]`; see `api.prefill`."""

    def step(state, token):
        t, query, key, value, g, beta = token
        query_hat = per_value_head(l2_normalise(query), value.shape[1])
        stepped = transition(state, make_columns(key, value, g, beta))
        on = t < live
        output = jnp.where(on[:, None, None], read(stepped, query_hat), 0.0)
        return jnp.where(on[:, None, None, None], stepped, state), output

    tokens = [jnp.moveaxis(x, 1, 0) for x in (query, key, value, g, beta)]
    state, outputs = jax.lax.scan(step, state, (jnp.arange(value.shape[1]), *tokens))
    return jnp.moveaxis(outputs, 0, 1), state


def verify(query, key, value, g, beta, state, live, *, layer):
    """Outputs of every live column; see `api.verify`."""
    return prefill(query, key, value, g, beta, state[layer], live)[0]


def fold(state, key, value, g, beta, count):
    """First `count[b]` recorded transitions, layer by layer; see `api.fold`."""

    def one_layer(state, key, value, g, beta):
        return prefill(key, key, value, g, beta, state, count)[1]

    return jax.vmap(one_layer)(state, key, value, g, beta)
