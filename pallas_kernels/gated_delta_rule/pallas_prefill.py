"""Pallas-Triton form of the chunked prefill: independent chunks first, then the walk over them.

`_chunk_kernel` solves the triangular system of one chunk of one value head, all chunks at once on
the grid; `_walk_kernel` carries a strip of the state through the chunks in order. The algebra is
that of the XLA form (Yang et al., 2024, section 3.3); padding and dead tokens have zero keys,
g = 0 and beta = 0, and leave no trace.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gated_delta_rule.transition import L2_EPS
from pallas_kernels.triton_call import load, padded_size, store, triton_call

CHUNK = 32  # tokens solved together
STRIP = 16  # value columns of a walking program; 32 spill on an H200
# Channels of a product's operands: the tensor cores want at least 16, and operands of 128 channels,
# each split into two TF32 numbers, do not fit in the registers.
_MIN_BLOCK, _BLOCK = 16, 64
_WARPS = 4


def _dot(precision):
    return functools.partial(jnp.dot, precision=precision, preferred_element_type=jnp.float32)


def _blocks(size):
    """Channel numbers of a head in blocks, e.g. 0..63 and 64..127; the last may reach past it."""
    padded = padded_size(size, _MIN_BLOCK)
    width = min(padded, _BLOCK)
    return [start + jnp.arange(width) for start in range(0, padded, width)]


class _Head:
    """One program's value head of one row; the grid is (chunk or strip, value head, row)."""

    def __init__(self, query, key, g, live, value_heads):
        self.query, self.key, self.g = query, key, g
        self.row, self.head = pl.program_id(2), pl.program_id(1)
        self.live = live[self.row]
        key_heads, self.key_dim = key.shape[-2:]
        self.key_head = self.head // (value_heads // key_heads)

    def tokens(self, index):
        """Token numbers of a chunk and which of them are live (`live <= T`, so none past T)."""
        token = index * CHUNK + jnp.arange(CHUNK)
        return token, token < self.live

    def gate(self, ref, index):
        """`[CHUNK]`, zeros at dead tokens."""
        token, on = self.tokens(index)
        return load(ref, (self.row, token, self.head), on)

    def rows(self, ref, index, head, column):
        """`[CHUNK, columns]` float32 of `ref[B, T, heads, D]`, zeros at dead tokens and past D."""
        token, on = self.tokens(index)
        mask = on[:, None] & (column < ref.shape[-1])[None, :]
        rows = load(ref, (self.row, token[:, None], head, column[None, :]), mask)
        return rows.astype(jnp.float32)

    def normalised(self, ref, index):
        """Blocks of the normalised rows of queries or keys."""
        blocks = [
            self.rows(ref, index, self.key_head, channel) for channel in _blocks(self.key_dim)
        ]
        squares = sum(jnp.sum(x * x, axis=1, keepdims=True) for x in blocks)
        return [x * jax.lax.rsqrt(squares + L2_EPS) for x in blocks]

    def solved(self, ref, index, column):
        """Index and mask of one chunk in `[B, Hv, chunks, CHUNK, D]`."""
        at = (self.row, self.head, index, jnp.arange(CHUNK)[:, None], column[None, :])
        return at, jnp.broadcast_to((column < ref.shape[-1])[None, :], (CHUNK, column.shape[0]))


def _inverse(strict):
    """`(I + A)^-1` of a strictly lower triangular `[CHUNK, CHUNK]` matrix A, row after row.

    Row i is `e_i - sum_j A[i, j] X[j]` over the rows j < i, which are done. The XLA form's
    products of blocks would be shorter to run, but unrolled they are most of the kernel's code.
    """
    row, column = jnp.arange(CHUNK)[:, None], jnp.arange(CHUNK)[None, :]

    def step(i, inverse):
        line = jnp.sum(jnp.where(row == i, strict, 0.0), axis=0)
        done = jnp.sum(line[:, None] * inverse, axis=0)
        return jnp.where(row == i, inverse - done[None, :], inverse)

    return jax.lax.fori_loop(1, CHUNK, step, jnp.where(row == column, 1.0, 0.0))


def _chunk_kernel(query, key, value, g, beta, live, fresh, carried, scores, *, precision):
    # query, key [B, T, Hk, Dk]; value [B, T, Hv, Dv]; g, beta [B, T, Hv]; live [B]
    # fresh, carried, scores [B, Hv, chunks, CHUNK, Dv | Dk | CHUNK]
    dot = _dot(precision)
    head = _Head(query, key, g, live, value.shape[2])
    index = pl.program_id(0)

    @pl.when(index * CHUNK < head.live)  # the walk never reads a dead chunk
    def _():
        row = jnp.arange(CHUNK)
        keys = head.normalised(key, index)
        strength = head.gate(beta, index)
        elapsed = jnp.cumsum(head.gate(g, index))

        gap = elapsed[:, None] - elapsed[None, :]
        decay = jnp.exp(jnp.where(row[:, None] >= row[None, :], gap, -jnp.inf))
        system = strength[:, None] * sum(dot(x, x.T) for x in keys) * decay
        inverse = _inverse(jnp.where(row[:, None] > row[None, :], system, 0.0))

        queries = head.normalised(query, index)
        attention = sum(dot(x, y.T) for x, y in zip(queries, keys, strict=True))
        at, mask = head.solved(scores, index, row)
        store(scores, at, attention * head.key_dim**-0.5 * decay, mask)

        scale = (strength * jnp.exp(elapsed))[:, None]
        for channel, block in zip(_blocks(head.key_dim), keys, strict=True):
            at, mask = head.solved(carried, index, channel)
            store(carried, at, dot(inverse, scale * block), mask)
        for column in _blocks(value.shape[3]):
            block = head.rows(value, index, head.head, column)
            at, mask = head.solved(fresh, index, column)
            store(fresh, at, dot(inverse, strength[:, None] * block), mask)


def _walk_kernel(
    query, key, g, live, fresh, carried, scores, before, output, state, *, precision
):
    # query, key [B, T, Hk, Dk]; g [B, T, Hv]; live [B]
    # fresh, carried, scores [B, Hv, chunks, CHUNK, Dv | Dk | CHUNK]
    # before, state [B, Hv, Dk, Dv]; output [B, T, Hv, Dv]
    dot = _dot(precision)
    tokens, value_heads, value_dim = output.shape[1:]
    head = _Head(query, key, g, live, value_heads)
    row = jnp.arange(CHUNK)
    column = pl.program_id(0) * STRIP + jnp.arange(STRIP)
    on_column = column < value_dim
    channels = _blocks(head.key_dim)

    def tile(channel):
        index = (head.row, head.head, channel[:, None], column[None, :])
        return index, (channel < head.key_dim)[:, None] & on_column[None, :]

    def store_rows(index, rows):
        token = index * CHUNK + row
        mask = (token < tokens)[:, None] & on_column[None, :]
        store(output, (head.row, token[:, None], head.head, column[None, :]), rows, mask)

    def step(index, state):  # the state in blocks of key channels, [<= 64, STRIP] each
        elapsed = jnp.cumsum(head.gate(g, index))
        last = jnp.sum(jnp.where(row == CHUNK - 1, elapsed, 0.0))
        update = load(fresh, *head.solved(fresh, index, column))
        for channel, block in zip(channels, state, strict=True):
            update -= dot(load(carried, *head.solved(carried, index, channel)), block)

        rows = dot(load(scores, *head.solved(scores, index, row)), update)
        scale = (jnp.exp(elapsed) * head.key_dim**-0.5)[:, None]
        for queries, block in zip(head.normalised(query, index), state, strict=True):
            rows += dot(scale * queries, block)
        store_rows(index, rows)

        scale = jnp.exp(last - elapsed)[:, None]
        return tuple(
            jnp.exp(last) * block + dot((scale * keys).T, update)
            for keys, block in zip(head.normalised(key, index), state, strict=True)
        )

    def clear(index, carry):
        store_rows(index, jnp.zeros((CHUNK, STRIP), jnp.float32))
        return carry

    live_chunks = pl.cdiv(head.live, CHUNK)
    start = tuple(load(before, *tile(channel)) for channel in channels)
    end = jax.lax.fori_loop(0, live_chunks, step, start)
    for channel, block in zip(channels, end, strict=True):
        index, mask = tile(channel)
        store(state, index, block, mask)
    jax.lax.fori_loop(live_chunks, pl.cdiv(tokens, CHUNK), clear, 0)


def prefill(query, key, value, g, beta, state, live, *, interpret=False):
    """See `api.prefill`."""
    rows, tokens, value_heads, value_dim = value.shape
    chunks = pl.cdiv(tokens, CHUNK)
    # Products of float32 numbers to float32 accuracy; on tensor cores as three TF32 products.
    precision = (
        jax.lax.Precision.HIGHEST if interpret else jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    )
    solved = triton_call(
        functools.partial(_chunk_kernel, precision=precision),
        name="gated_delta_chunks",
        out_shape=tuple(
            jax.ShapeDtypeStruct((rows, value_heads, chunks, CHUNK, width), jnp.float32)
            for width in (value_dim, key.shape[3], CHUNK)
        ),
        grid=(chunks, value_heads, rows),
        operands=(query, key, value, g, beta, live),
        num_warps=_WARPS,
        interpret=interpret,
    )
    return triton_call(
        functools.partial(_walk_kernel, precision=precision),
        name="gated_delta_walk",
        out_shape=(
            jax.ShapeDtypeStruct(value.shape, jnp.float32),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ),
        grid=(pl.cdiv(value_dim, STRIP), value_heads, rows),
        operands=(query, key, g, live, *solved, state),
        num_warps=_WARPS,
        interpret=interpret,
    )
