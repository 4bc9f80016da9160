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
from jax.experimental.pallas import triton as plt

from pallas_kernels.gated_delta_rule.transition import l2_normalise

# Tokens per chunk: with 32 every [chunk, 128] tile is 32 registers per thread of four warps.
CHUNK = 32
_BASE = 8  # the inverse starts from diagonal blocks of this width
_STRIP = 32  # value columns of a walking program
_MIN_DOT = 16  # smallest side of a product's operands


def _padded(size: int) -> int:
    return max(_MIN_DOT, pl.next_power_of_2(size))


def _total(x, axis):
    return jnp.sum(x, axis=axis, keepdims=True)


def _dot(precision):
    return functools.partial(jnp.dot, precision=precision, preferred_element_type=jnp.float32)


def _chunk_tokens(index, live):
    """Token numbers of a chunk and which of them are live (never past `live <= T`)."""
    token = index * CHUNK + jnp.arange(CHUNK)
    return token, token < live


def _load_rows(ref, token, on, column, width):
    """`[CHUNK, padded]` float32 of `ref[T, width]`; zeros at dead tokens and padded columns."""
    mask = on[:, None] & (column < width)[None, :]
    return plt.load(ref.at[token[:, None], column[None, :]], mask=mask, other=0.0).astype(
        jnp.float32
    )


def _inverse(strict, dot):
    """`(I + A)^-1` of a strictly lower triangular `[CHUNK, CHUNK]` matrix A.

    As in the XLA form: blocks of 8 by `(I - D)(I + D^2)(I + D^4)`, then doubling. Blocks cannot
    be cut out of a register tile, so that all stay in place: with X the inverse of the diagonal
    blocks and B what lies below them inside blocks of twice the width, the next X is X - X B X.
    """
    row, column = jnp.arange(CHUNK)[:, None], jnp.arange(CHUNK)[None, :]

    def same_block(width):
        return row // width == column // width

    eye = jnp.where(row == column, 1.0, 0.0)
    diagonal = jnp.where(same_block(_BASE), strict, 0.0)
    square = dot(diagonal, diagonal)
    inverse = dot(dot(eye - diagonal, eye + square), eye + dot(square, square))
    width = _BASE
    while width < CHUNK:
        below = jnp.where(same_block(2 * width) & ~same_block(width), strict, 0.0)
        inverse = inverse - dot(dot(inverse, below), inverse)
        width *= 2
    return inverse


def _chunk_kernel(
    query, key, value, g, beta, live, fresh, carried, scores, *, precision
):
    # query, key [T, Dk]; value [T, Dv]; g, beta [T]; live [1]
    # fresh [CHUNK, Dv]; carried [CHUNK, Dk]; scores [CHUNK, CHUNK]
    dot = _dot(precision)
    key_dim, value_dim = key.shape[1], value.shape[1]
    index = pl.program_id(0)

    @pl.when(index * CHUNK < live[0])  # the walk never reads a dead chunk
    def _():
        token, on = _chunk_tokens(index, live[0])
        row = jnp.arange(CHUNK)
        channel = jnp.arange(_padded(key_dim))
        query_hat = l2_normalise(_load_rows(query, token, on, channel, key_dim), _total)
        key_hat = l2_normalise(_load_rows(key, token, on, channel, key_dim), _total)
        strength = plt.load(beta.at[token], mask=on, other=0.0)
        total = jnp.cumsum(plt.load(g.at[token], mask=on, other=0.0))

        lower = row[:, None] >= row[None, :]
        decay = jnp.exp(jnp.where(lower, total[:, None] - total[None, :], -jnp.inf))
        system = strength[:, None] * dot(key_hat, key_hat.T) * decay
        inverse = _inverse(jnp.where(row[:, None] > row[None, :], system, 0.0), dot)

        scale = key_dim**-0.5
        scores[...] = dot(query_hat * scale, key_hat.T) * decay
        right = (strength * jnp.exp(total))[:, None] * key_hat
        kept = jnp.broadcast_to((channel < key_dim)[None, :], right.shape)
        plt.store(carried.at[row[:, None], channel[None, :]], dot(inverse, right), mask=kept)

        channel = jnp.arange(_padded(value_dim))
        right = strength[:, None] * _load_rows(value, token, on, channel, value_dim)
        kept = jnp.broadcast_to((channel < value_dim)[None, :], right.shape)
        plt.store(fresh.at[row[:, None], channel[None, :]], dot(inverse, right), mask=kept)


def _walk_kernel(
    query, key, g, live, fresh, carried, scores, state, output, after, *, precision
):
    # query, key [T, Dk]; g [T]; live [1]; fresh [chunks, CHUNK, Dv]; carried [chunks, CHUNK, Dk]
    # scores [chunks, CHUNK, CHUNK]; state, after [Dk, Dv]; output [T, Dv]
    dot = _dot(precision)
    key_dim, (tokens, value_dim) = key.shape[1], output.shape
    row, channel = jnp.arange(CHUNK), jnp.arange(_padded(key_dim))
    column = pl.program_id(0) * _STRIP + jnp.arange(_STRIP)
    on_channel, on_column = channel < key_dim, column < value_dim
    where = (channel[:, None], column[None, :])
    kept = on_channel[:, None] & on_column[None, :]

    def store_rows(token, rows):
        mask = (token < tokens)[:, None] & on_column[None, :]
        plt.store(output.at[token[:, None], column[None, :]], rows, mask=mask)

    def step(i, state):
        token, on = _chunk_tokens(i, live[0])
        total = jnp.cumsum(plt.load(g.at[token], mask=on, other=0.0))
        last = jnp.sum(jnp.where(row == CHUNK - 1, total, 0.0))
        block = jnp.broadcast_to(on_channel[None, :], (CHUNK, channel.shape[0]))
        carried_in = plt.load(
            carried.at[i, row[:, None], channel[None, :]], mask=block, other=0.0
        )
        block = jnp.broadcast_to(on_column[None, :], (CHUNK, _STRIP))
        update = plt.load(fresh.at[i, row[:, None], column[None, :]], mask=block, other=0.0)
        update = update - dot(carried_in, state)

        query_hat = l2_normalise(_load_rows(query, token, on, channel, key_dim), _total)
        query_in = (jnp.exp(total) * key_dim**-0.5)[:, None] * query_hat
        store_rows(token, dot(query_in, state) + dot(scores[i, :, :], update))

        key_hat = l2_normalise(_load_rows(key, token, on, channel, key_dim), _total)
        key_out = jnp.exp(last - total)[:, None] * key_hat
        return jnp.exp(last) * state + dot(key_out.T, update)

    def clear(i, carry):
        store_rows(i * CHUNK + row, jnp.zeros((CHUNK, _STRIP), jnp.float32))
        return carry

    live_chunks = pl.cdiv(live[0], CHUNK)
    first = plt.load(state.at[where], mask=kept, other=0.0)
    plt.store(after.at[where], jax.lax.fori_loop(0, live_chunks, step, first), mask=kept)
    jax.lax.fori_loop(live_chunks, pl.cdiv(tokens, CHUNK), clear, 0)


def prefill(query, key, value, g, beta, state, live, *, interpret=False):
    """See `api.prefill`."""
    rows, tokens, value_heads, value_dim = value.shape
    key_heads, key_dim = key.shape[2:]
    ratio, chunks = value_heads // key_heads, pl.cdiv(tokens, CHUNK)
    # Products of float32 numbers to float32 accuracy: on the tensor cores as three TF32 products.
    precision = (
        jax.lax.Precision.HIGHEST if interpret else jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    )

    # Both grids have the head on axis 1 and the row on axis 2.
    keys = pl.BlockSpec((None, tokens, None, key_dim), lambda i, h, b: (b, 0, h // ratio, 0))
    values = pl.BlockSpec((None, tokens, None, value_dim), lambda i, h, b: (b, 0, h, 0))
    gates = pl.BlockSpec((None, tokens, None), lambda i, h, b: (b, 0, h))
    count = pl.BlockSpec((1,), lambda i, h, b: (b,))
    states = pl.BlockSpec((None, None, key_dim, value_dim), lambda i, h, b: (b, h, 0, 0))

    widths = (value_dim, key_dim, CHUNK)  # of fresh, carried and scores
    solved = pl.pallas_call(
        functools.partial(_chunk_kernel, precision=precision),
        out_shape=[
            jax.ShapeDtypeStruct((rows, value_heads, chunks, CHUNK, width), jnp.float32)
            for width in widths
        ],
        grid=(chunks, value_heads, rows),
        in_specs=[keys, keys, values, gates, gates, count],
        out_specs=[
            pl.BlockSpec((None, None, None, CHUNK, width), lambda i, h, b: (b, h, i, 0, 0))
            for width in widths
        ],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="gated_delta_chunks",
    )(query, key, value, g, beta, live)

    output, after = pl.pallas_call(
        functools.partial(_walk_kernel, precision=precision),
        out_shape=[
            jax.ShapeDtypeStruct(value.shape, jnp.float32),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ],
        grid=(pl.cdiv(value_dim, _STRIP), value_heads, rows),
        in_specs=[
            keys,
            keys,
            gates,
            count,
            *(
                pl.BlockSpec((None, None, chunks, CHUNK, width), lambda i, h, b: (b, h, 0, 0, 0))
                for width in widths
            ),
            states,
        ],
        out_specs=[values, states],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="gated_delta_walk",
    )(query, key, g, live, *solved, state)
    return output, after
