"""Dispatch of the gated delta rule.

Shapes everywhere: query, key `[B, T, Hk, Dk]` raw (normalised inside), value `[B, T, Hv, Dv]`,
g and beta `[B, T, Hv]` float32 (log decay and write strength), state `[B, Hv, Dk, Dv]` float32.
`Hv` is a multiple of `Hk`; value head j uses key head `j // (Hv / Hk)`. `implementation` is None
(best available), "pallas", "pallas_interpret", "xla" or "reference"; a ValueError names a shape
that does not fit, or an implementation that is unknown or that this device cannot run. Fold
reproduces the states of a verify of the same implementation to the bit, not those of another.
"""

import jax

from pallas_kernels import dispatch
from pallas_kernels.gated_delta_rule import pallas, pallas_prefill, reference, xla
from pallas_kernels.triton_call import with_xla_gradient

_PREFILL = {
    "xla": xla.prefill,
    "reference": reference.prefill,
    "pallas": with_xla_gradient(pallas_prefill.prefill, xla.prefill),
}
_VERIFY = {"xla": xla.verify, "reference": reference.verify, "pallas": pallas.verify}
_FOLD = {"xla": xla.fold, "reference": reference.fold, "pallas": pallas.fold}


def _check(query, key, value, g, beta, state, rows):
    """Shapes of one layer; `rows` is live or count."""
    batch, tokens, value_heads, value_dim = value.shape
    key_heads, key_dim = key.shape[2:]
    if value_heads % key_heads:
        raise ValueError(
            f"gated_delta_rule: {value_heads} value heads are not a multiple of "
            f"{key_heads} key heads"
        )
    expected = {
        "query": (query, (batch, tokens, key_heads, key_dim)),
        "key": (key, (batch, tokens, key_heads, key_dim)),
        "g": (g, (batch, tokens, value_heads)),
        "beta": (beta, (batch, tokens, value_heads)),
        "state": (state, (batch, value_heads, key_dim, value_dim)),
        "live": (rows, (batch,)),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"gated_delta_rule: {name} has shape {array.shape}, expected {shape}")


def prefill(query, key, value, g, beta, state, live, *, implementation: str | None = None):
    """Runs the first `live[b]` tokens of each row from `state`.

    Returns:
      Outputs `[B, T, Hv, Dv]` float32 (those of dead tokens are unspecified but finite) and the
      state after `live[b]` tokens. Dead tokens may hold anything, NaN included.
    """
    _check(query, key, value, g, beta, state, live)
    function = dispatch.choose("gated_delta_rule.prefill", _PREFILL, implementation)
    return function(query, key, value, g, beta, state, live)


def verify(
    query,
    key,
    value,
    g,
    beta,
    state,
    live,
    *,
    layer: int | None = None,
    implementation: str | None = None,
):
    """Outputs `[B, T, Hv, Dv]` float32 of the live columns; dead columns give zero.

    `state` is read only: what Fold needs is the inputs themselves (key, value, g, beta). With
    `layer` it is the state of all layers `[L, B, Hv, Dk, Dv]`, of which that one is read: a GPU
    kernel cannot take a slice without a copy of it. The XLA form loops to the longest row and has
    no reverse-mode gradient; `prefill` has.
    """
    if layer is None:
        state, layer = state[None], 0
    if not 0 <= layer < state.shape[0]:
        raise ValueError(
            f"gated_delta_rule.verify: layer is {layer}, expected 0..{state.shape[0] - 1}"
        )
    of_layer = jax.ShapeDtypeStruct(state.shape[1:], state.dtype)
    _check(query, key, value, g, beta, of_layer, live)
    function = dispatch.choose("gated_delta_rule.verify", _VERIFY, implementation)
    return function(query, key, value, g, beta, state, live, layer=layer)


def fold(
    state: jax.Array, key, value, g, beta, count, *, implementation: str | None = None
) -> jax.Array:
    """State after the first `count[b]` recorded columns, every layer at once.

    All arrays carry a leading layer axis; `count [B]` is shared by the layers. Bit for bit the
    state that `verify` went through; columns past `count` are never used. Donate the state to
    update it in place.
    """
    layers = {x.shape[0] for x in (state, key, value, g, beta)}
    if len(layers) != 1:
        raise ValueError(f"gated_delta_rule.fold: layer axes differ: {sorted(layers)}")
    _check(key[0], key[0], value[0], g[0], beta[0], state[0], count)
    function = dispatch.choose("gated_delta_rule.fold", _FOLD, implementation)
    return function(state, key, value, g, beta, count)
