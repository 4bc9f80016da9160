"""Pallas-Triton form: verify and Fold, one warp per strip of a head's state.

A program keeps `[Dk, 8]` of one value head's state in registers, walks the columns with the shared
transition, and either stores every output (verify) or the state at the end (Fold). Both walk with
the same tile, the same number of warps and the same `_advance`, so that the reductions run in the
same order and the states agree to the bit; the tests compare them.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.gated_delta_rule.transition import (
    Column,
    l2_normalise,
    read,
    transition,
)

# Value columns per program. Rows of 8 float32 are one 32-byte sector; a 128 x 8 tile on one warp
# takes 32 registers per thread and its sums never leave the warp.
_STRIP = 8


def _total(x, axis):
    """The sum of a tile. Its order follows from shape and warps, equal in verify and Fold."""
    return jnp.sum(x, axis=axis, keepdims=True)


def _advance(state, key, value, g, beta):
    """The transition of one value head's strip from raw records."""
    column = Column(
        l2_normalise(key, _total), value.astype(jnp.float32), jnp.exp(g), beta
    )
    return transition(state, column, _total)


class _Strip:
    """Indices and masks of one program's strip; sizes are padded to powers of two."""

    def __init__(self, key_dim: int, value_dim: int):
        self.key = jnp.arange(pl.next_power_of_2(key_dim))
        self.value = pl.program_id(0) * _STRIP + jnp.arange(_STRIP)
        self.key_mask, self.value_mask = self.key < key_dim, self.value < value_dim

    def state(self, ref):
        where = ref.at[self.key[:, None], self.value[None, :]]
        return where, self.key_mask[:, None] & self.value_mask[None, :]

    def load_key(self, ref, t):
        return plt.load(ref.at[t, self.key], mask=self.key_mask, other=0.0)

    def load_value(self, ref, t):
        return plt.load(ref.at[t, self.value], mask=self.value_mask, other=0.0)


def _verify_kernel(query, key, value, g, beta, state, live, output):
    # query, key [T, Dk]; value, output [T, Dv]; g, beta [T]; state [Dk, Dv]; live [1]
    tokens, value_dim = value.shape
    strip = _Strip(key.shape[1], value_dim)
    scale = key.shape[1] ** -0.5
    where, mask = strip.state(state)
    count = live[0]

    def step(t, carry):
        carry = _advance(
            carry, strip.load_key(key, t), strip.load_value(value, t), g[t], beta[t]
        )
        query_hat = l2_normalise(strip.load_key(query, t), _total)
        row = jnp.sum(carry * query_hat[:, None], axis=0) * scale
        plt.store(output.at[t, strip.value], row, mask=strip.value_mask)
        return carry

    jax.lax.fori_loop(0, count, step, plt.load(where, mask=mask, other=0.0))

    def clear(t, carry):
        nothing = jnp.zeros((_STRIP,), jnp.float32)
        plt.store(output.at[t, strip.value], nothing, mask=strip.value_mask)
        return carry

    jax.lax.fori_loop(count, tokens, clear, 0)


def _fold_kernel(state, key, value, g, beta, count, out):
    # state, out [Dk, Dv], one buffer; key [W, Dk]; value [W, Dv]; g, beta [W]; count [1]
    del state
    strip = _Strip(key.shape[1], value.shape[1])
    where, mask = strip.state(out)

    @pl.when(count[0] > 0)  # a row that commits nothing is neither read nor written
    def _():
        def step(t, carry):
            return _advance(
                carry, strip.load_key(key, t), strip.load_value(value, t), g[t], beta[t]
            )

        last = jax.lax.fori_loop(0, count[0], step, plt.load(where, mask=mask, other=0.0))
        plt.store(where, last, mask=mask)


def _specs(tokens, key_heads, value_heads, key_dim, value_dim, row_count):
    """Block specs for the grid (strip, value head, row), by kind of array."""
    ratio = value_heads // key_heads
    return {
        "key": pl.BlockSpec((None, tokens, None, key_dim), lambda s, h, r: (r, 0, h // ratio, 0)),
        "value": pl.BlockSpec((None, tokens, None, value_dim), lambda s, h, r: (r, 0, h, 0)),
        "gate": pl.BlockSpec((None, tokens, None), lambda s, h, r: (r, 0, h)),
        "state": pl.BlockSpec((None, None, key_dim, value_dim), lambda s, h, r: (r, h, 0, 0)),
        # Layers and batch rows are one axis of the grid; the layers of a row share its count.
        "count": pl.BlockSpec((1,), lambda s, h, r: (r % row_count,)),
    }


def verify(query, key, value, g, beta, state, live, *, interpret=False):
    """See `api.verify`."""
    rows, tokens, value_heads, value_dim = value.shape
    spec = _specs(tokens, key.shape[2], value_heads, key.shape[3], value_dim, rows)
    return pl.pallas_call(
        _verify_kernel,
        out_shape=jax.ShapeDtypeStruct(value.shape, jnp.float32),
        grid=(pl.cdiv(value_dim, _STRIP), value_heads, rows),
        in_specs=[
            spec[kind] for kind in ("key", "key", "value", "gate", "gate", "state", "count")
        ],
        out_specs=spec["value"],
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="gated_delta_verify",
    )(query, key, value, g, beta, state, live)


def fold(state, key, value, g, beta, count, *, interpret=False):
    """See `api.fold`. In place when the state is donated."""
    layers, rows, tokens, value_heads, value_dim = value.shape
    state, key, value, g, beta = (
        x.reshape(layers * rows, *x.shape[2:]) for x in (state, key, value, g, beta)
    )
    spec = _specs(tokens, key.shape[2], value_heads, key.shape[3], value_dim, rows)
    folded = pl.pallas_call(
        _fold_kernel,
        out_shape=jax.ShapeDtypeStruct(state.shape, state.dtype),
        grid=(pl.cdiv(value_dim, _STRIP), value_heads, layers * rows),
        in_specs=[spec[kind] for kind in ("state", "key", "value", "gate", "gate", "count")],
        out_specs=spec["state"],
        input_output_aliases={0: 0},
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="gated_delta_fold",
    )(state, key, value, g, beta, count)
    return folded.reshape(layers, rows, *folded.shape[1:])
