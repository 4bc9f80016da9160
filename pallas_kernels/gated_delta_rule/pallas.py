"""Pallas-Triton form of verify and Fold: one warp per strip of one head's state.

A program keeps `[Dk, 8]` of a value head's state in registers, walks the columns with the shared
transition, and stores either every output (verify) or the state at the end (Fold). Both walk with
the same tile, the same number of warps and the same `_advance`, so that their sums run in the
same order and the states agree to the bit.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gated_delta_rule.transition import Column, l2_normalise, read, transition
from pallas_kernels.triton_call import load, padded_size, store, triton_call

# Value columns per program. A row of 8 float32 is one 32-byte sector; a 128 x 8 tile on one warp
# takes 32 registers per thread, and its sums never leave the warp.
STRIP = 8


def total(x, axis):
    """The sum of a tile; its order follows from the tile's shape and warps alone."""
    return jnp.sum(x, axis=axis, keepdims=True)


class _Strip:
    """One program's share of a row: a value head, its key head, and STRIP value columns.

    The grid is (strip, value head, row). Sizes that are no powers of two are padded and masked.
    """

    def __init__(self, key, value):
        key_heads, key_dim = key.shape[-2:]
        value_heads, value_dim = value.shape[-2:]
        self.row, self.head = pl.program_id(2), pl.program_id(1)
        self.key_head = self.head // (value_heads // key_heads)
        self.channel = jnp.arange(padded_size(key_dim))
        self.column = pl.program_id(0) * STRIP + jnp.arange(STRIP)
        self.on_channel, self.on_column = self.channel < key_dim, self.column < value_dim

    def state(self, *layer):
        """Index and mask of the `[Dk, STRIP]` tile in `[R, Hv, Dk, Dv]`, or of one layer of it."""
        index = (*layer, self.row, self.head, self.channel[:, None], self.column[None, :])
        return index, self.on_channel[:, None] & self.on_column[None, :]

    def load_key(self, ref, t):
        return load(ref, (self.row, t, self.key_head, self.channel), self.on_channel)

    def load_column(self, key, value, g, beta, t):
        """The transition's operands from the raw record of column t."""
        gate = (self.row, t, self.head)
        return Column(
            l2_normalise(self.load_key(key, t), total),
            load(value, (*gate, self.column), self.on_column).astype(jnp.float32),
            jnp.exp(g[gate]),
            beta[gate],
        )

    def store_output(self, ref, t, output):
        store(ref, (self.row, t, self.head, self.column), output, self.on_column)


def _verify_kernel(query, key, value, g, beta, state, live, output, *, layer):
    # query, key [B, W, Hk, Dk]; value, output [B, W, Hv, Dv]; g, beta [B, W, Hv]
    # state [L, B, Hv, Dk, Dv]; live [B]
    strip = _Strip(key, value)

    def step(t, state):
        state = transition(state, strip.load_column(key, value, g, beta, t), total)
        query_hat = l2_normalise(strip.load_key(query, t), total)
        # The scale is that of the head, not of its padded size.
        row = read(state, query_hat, total, key.shape[-1])
        strip.store_output(output, t, row)
        return state

    def clear(t, carry):
        strip.store_output(output, t, jnp.zeros((STRIP,), jnp.float32))
        return carry

    live = live[strip.row]
    jax.lax.fori_loop(0, live, step, load(state, *strip.state(layer)))
    jax.lax.fori_loop(live, value.shape[1], clear, 0)


def _fold_kernel(before, key, value, g, beta, count, state, *, rows):
    # before and state [L * B, Hv, Dk, Dv] are one buffer, touched as `state`
    # key [L * B, W, Hk, Dk]; value [L * B, W, Hv, Dv]; g, beta [L * B, W, Hv]; count [B]
    del before
    strip = _Strip(key, value)
    count = count[strip.row % rows]  # the layers of a row share its count

    @pl.when(count > 0)  # a row that commits nothing is neither read nor written
    def _():
        def step(t, state):
            return transition(state, strip.load_column(key, value, g, beta, t), total)

        index, mask = strip.state()
        folded = jax.lax.fori_loop(0, count, step, load(state, index, mask))
        store(state, index, folded, mask)


def verify(query, key, value, g, beta, state, live, *, layer, interpret=False):
    """See `api.verify`."""
    rows, _, value_heads, value_dim = value.shape
    return triton_call(
        functools.partial(_verify_kernel, layer=layer),
        name="gated_delta_verify",
        out_shape=jax.ShapeDtypeStruct(value.shape, jnp.float32),
        grid=(pl.cdiv(value_dim, STRIP), value_heads, rows),
        operands=(query, key, value, g, beta, state, live),
        num_warps=1,
        interpret=interpret,
    )


def fold(state, key, value, g, beta, count, *, interpret=False):
    """See `api.fold`. In place when the state is donated."""
    layers, rows, _, value_heads, value_dim = value.shape
    stacked = [x.reshape(layers * rows, *x.shape[2:]) for x in (state, key, value, g, beta)]
    folded = triton_call(
        functools.partial(_fold_kernel, rows=rows),
        name="gated_delta_fold",
        out_shape=jax.ShapeDtypeStruct(stacked[0].shape, state.dtype),
        grid=(pl.cdiv(value_dim, STRIP), value_heads, layers * rows),
        operands=(*stacked, count),
        num_warps=1,
        aliases={0: 0},
        interpret=interpret,
    )
    return folded.reshape(state.shape)
