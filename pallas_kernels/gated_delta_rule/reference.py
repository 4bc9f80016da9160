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
    value_heads = value.shape[2]
    outputs = []
    for t in range(value.shape[1]):
        query_hat = per_value_head(l2_normalise(query[:, t]), value_heads)
        stepped = transition(state, make_columns(key[:, t], value[:, t], g[:, t], beta[:, t]))
        on = t < live
        state = jnp.where(on[:, None, None, None], stepped, state)
        outputs.append(jnp.where(on[:, None, None], read(stepped, query_hat), 0.0))
    return jnp.stack(outputs, axis=1), state


def verify(query, key, value, g, beta, state, live):
    """Outputs of every live column; see `api.verify`."""
    return prefill(query, key, value, g, beta, state, live)[0]


def fold(state, key, value, g, beta, count):
    """First `count[b]` recorded transitions, layer by layer; see `api.fold`."""

    def one_layer(state, key, value, g, beta):
        return prefill(key, key, value, g, beta, state, count)[1]

    return jax.vmap(one_layer)(state, key, value, g, beta)
