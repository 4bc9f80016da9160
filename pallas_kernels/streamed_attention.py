"""The attention kernel of both attention ops: context tiles streamed under one online softmax.

One program holds the queries of one key head of one row (all columns of its query group, or a
tile of them) and reads a span of the context once; the block itself belongs to span 0. Several
spans leave partial sums, which a second, small kernel combines. Positions are walked, not slots:
the ring slot or page of a position is computed where it is loaded, so that a ring is never
rolled, no mask exists outside registers, and what no query of the tile sees is never read.

References:
  Online softmax over tiles and its combination: FlashAttention-2, Dao 2023, section 3.1;
  Flash-Decoding, Dao et al. 2023.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.grouped_attention import MASKED
from pallas_kernels.triton_call import load, padded_size, store, triton_call

_QUERY_ROWS = 64
# Accumulators that four warps hold; with twice as many an A100 is out of registers.
_FOUR_WARPS = 32 * 128
_MAX_SPANS = 32  # times rows and key heads: enough programs for every GPU, few partial sums


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the work is cut; a function of shapes and not of the batch.

    So a row's sums are grouped alike in every batch size, and its result is the same to the bit.

    Attributes:
      query_rows: rows of a query tile; row r is column r // group, head r % group of the group.
      query_tiles: tiles that cover the columns of all heads of a group.
      keys: context positions per step.
      block_keys: block columns per step.
      span: context positions per program, a multiple of `keys`.
      spans: programs along the context.
    """

    query_rows: int
    query_tiles: int
    keys: int
    block_keys: int
    span: int
    spans: int

    @classmethod
    def of(cls, tokens: int, group: int, dim: int, itemsize: int, capacity: int) -> "Tiling":
        """Tiling of `tokens` columns with `group` heads per key head over `capacity` positions."""
        rows = min(padded_size(tokens * group, 16), _QUERY_ROWS)
        tiles = -(-tokens * group // rows)
        # Keys and values of two steps are in flight in shared memory: at most 64 KiB together.
        keys = max(16, 16384 // (padded_size(dim, 16) * itemsize))
        keys = min(keys, 64)
        # Partial sums cost 2 * rows floats per dimension and span, keys and values `span`
        # floats: with eight times the rows that is a quarter on top.
        spans = min(-(-capacity // max(256, 8 * rows)), max(1, _MAX_SPANS // tiles))
        span = -(-capacity // (max(spans, 1) * keys)) * keys
        return cls(rows, tiles, keys, min(padded_size(tokens, 16), keys), span, max(spans, 1))

    def warps(self, dim: int) -> int:
        """Warps of an attending program."""
        return 4 if self.query_rows * padded_size(dim, 16) <= _FOUR_WARPS else 8


def counts(
    *,
    rows: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    itemsize: int,
    context: int,
    capacity: int,
) -> tuple[int, int, int]:
    """(least bytes, moved bytes, flops) of a call, see `shapes.Case`.

    Args:
      rows: B.
      tokens: columns, all live.
      heads: N.
      kv_heads: K.
      dim: D.
      itemsize: bytes of an element, the same everywhere.
      context: context positions that are seen per row.
      capacity: positions the kernel is built for.
    """
    tiling = Tiling.of(tokens, heads // kv_heads, dim, itemsize, capacity)
    used = max(1, -(-context // tiling.span))
    queries = 2 * rows * tokens * heads * dim * itemsize  # in and out
    keys = 2 * rows * (context + tokens) * kv_heads * dim * itemsize
    partial = 0
    if tiling.spans > 1:  # two statistics and the mixed values, float32, written and read
        partial = 2 * rows * tokens * heads * used * (dim + 2) * 4
    # Each query tile reads the keys of its head again, and each span the queries.
    moved = keys * tiling.query_tiles + queries // 2 * (1 + used) + partial
    return queries + keys, moved, 4 * rows * tokens * heads * dim * (context + tokens)


@dataclasses.dataclass(frozen=True)
class _Statics:
    """What both kernels know while they are traced."""

    tiling: Tiling
    names: tuple[str, ...]
    layer: int
    window: int | None
    causal: bool
    scale: float
    tokens: int
    group: int
    dim: int
    page: int
    capacity: int


def streamed_attention(
    q: jax.Array,
    block_key: jax.Array,
    block_value: jax.Array,
    context_key: jax.Array,
    context_value: jax.Array,
    lengths: jax.Array,
    live: jax.Array,
    *,
    table: jax.Array | None = None,
    ancestors: jax.Array | None = None,
    window: int | None = None,
    layer: int,
    causal: bool,
    scale: float,
    name: str,
    interpret: bool = False,
) -> jax.Array:
    """Attends from a block at positions `lengths[b] + i` to a context and to itself.

    Args:
      q: `[B, T, N, D]`.
      block_key: `[B, T, K, D]`.
      block_value: `[B, T, K, D]`.
      context_key: `[L, P, page, K, D]`, a pool of pages; without `table` row b has page b alone
        as a ring (P = B).
      context_value: likewise.
      lengths: `[B]`, context positions of each row.
      live: `[B]`, live columns; dead ones give zeros.
      table: `[B, max_pages]`, page ids in order, or None for rings.
      ancestors: `[B, T]`, bit a of column c: c sees block column a (T <= 32); or None.
      window: a query sees keys at a distance below it; None: at any distance.
      layer: which layer of the pool.
      causal: whether the block is causal where there is no `ancestors`.
      scale: factor on the scores.
      name: of the kernels, in profiles; the combining one adds "_combine".
      interpret: run as an XLA program.

    Returns:
      `[B, T, N, D]` in `q.dtype`; scores, softmax and sums in float32.
    """
    rows, tokens, heads, dim = q.shape
    kv_heads, page = block_key.shape[2], context_key.shape[2]
    group = heads // kv_heads
    # Of a ring no query sees more than window - 1 positions.
    capacity = window - 1 if table is None else table.shape[1] * page
    itemsize = max(context_key.dtype.itemsize, q.dtype.itemsize)
    tiling = Tiling.of(tokens, group, dim, itemsize, max(capacity, 1))
    operands = {
        "q": q,
        "block_key": block_key,
        "block_value": block_value,
        "context_key": context_key,
        "context_value": context_value,
        "lengths": lengths,
        "live": live,
    }
    if table is not None:
        operands["table"] = table
    if ancestors is not None:
        operands["ancestors"] = lax.bitcast_convert_type(ancestors, jnp.int32)
    statics = _Statics(
        tiling, tuple(operands), layer, window, causal, scale, tokens, group, dim, page, capacity
    )  # fmt: skip
    call = functools.partial(
        triton_call,
        operands=tuple(operands.values()),
        num_warps=tiling.warps(dim),
        num_stages=2,
        interpret=interpret,
    )
    grid = (tiling.query_tiles * kv_heads, tiling.spans, rows)
    output = jax.ShapeDtypeStruct(q.shape, q.dtype)
    if tiling.spans == 1:
        kernel = functools.partial(_attend_kernel, statics=statics)
        return call(kernel, name=name, out_shape=output, grid=grid)

    lead = (rows, grid[0], tiling.spans, tiling.query_rows)
    stat = jax.ShapeDtypeStruct(lead, jnp.float32)
    mixed = jax.ShapeDtypeStruct((*lead, dim), jnp.float32)
    kernel = functools.partial(_attend_kernel, statics=statics)
    partials = call(kernel, name=name, out_shape=(stat, stat, mixed), grid=grid)
    return triton_call(
        functools.partial(_combine_kernel, statics=statics),
        name=f"{name}_combine",
        out_shape=output,
        grid=(tiling.query_rows // _COMBINED_ROWS, grid[0], rows),
        operands=(lengths, live, *partials),
        num_warps=4,
        interpret=interpret,
    )


def _extent(statics, tile, length, live):
    """Columns [first, last] of a query tile and the context positions [low, high) it sees."""
    rows = statics.tiling.query_rows
    first = lax.div(tile * rows, statics.group)
    last = jnp.minimum(lax.div(tile * rows + rows - 1, statics.group), statics.tokens - 1)
    if statics.window is None:
        low, high = jnp.int32(0), jnp.minimum(length, statics.capacity)
    else:
        low, high = jnp.maximum(length - statics.window + 1 + first, 0), length
    high = jnp.where(first < live, jnp.maximum(high, low), low)
    return first, last, low, high


def _spans_used(statics, low, high):
    """Spans that hold anything; span 0 always does, since the block belongs to it."""
    span = statics.tiling.span
    return jnp.maximum(lax.div(high - low + span - 1, span), 1)


def _query_rows(statics, tile, start, count):
    """(column, head within the group) of rows start.. of a query tile, and which exist."""
    row = tile * statics.tiling.query_rows + start + jnp.arange(count)
    exists = row < statics.tokens * statics.group
    return lax.div(row, statics.group), lax.rem(row, statics.group), exists


def _update(state, q, key, value, allowed, scale):
    """One step of the online softmax in base 2 (`scale` holds log2 e)."""
    top, total, mixed = state
    # TF32 passes would not give a float32 model its float32 text.
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    scores = jnp.dot(q, key.T, precision=precision, preferred_element_type=jnp.float32)
    scores = jnp.where(allowed, scores * scale, MASKED)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    # A query that has seen nothing yet has new_top = MASKED, where exp2 would give 1.
    weights = jnp.where(allowed, jnp.exp2(scores - new_top[:, None]), 0.0)
    rescale = jnp.exp2(top - new_top)
    precision = lax.Precision.HIGHEST if value.dtype == jnp.float32 else None
    mixed = mixed * rescale[:, None] + jnp.dot(
        weights.astype(value.dtype), value, precision=precision,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return new_top, total * rescale + jnp.sum(weights, axis=1), mixed


def _attend_kernel(*refs, statics):
    s, tiling = statics, statics.tiling
    ref = dict(zip(s.names, refs, strict=False))
    outputs = refs[len(s.names) :]
    place, span_index, row = (pl.program_id(axis) for axis in range(3))
    head, tile = lax.div(place, tiling.query_tiles), lax.rem(place, tiling.query_tiles)
    length, live = ref["lengths"][row], ref["live"][row]
    first, last, low, high = _extent(s, tile, length, live)

    column, member, exists = _query_rows(s, tile, 0, tiling.query_rows)
    query_live = exists & (column < live)
    dims = jnp.arange(padded_size(s.dim, 16))[None, :]
    in_dim = dims < s.dim
    address = (row, column[:, None], head * s.group + member[:, None], dims)
    scale = s.scale * math.log2(math.e)

    def attend_context(step, state, q, start):
        position = start + step * tiling.keys + jnp.arange(tiling.keys)
        seen = position < jnp.minimum(start + tiling.span, high)
        if "table" in ref:
            entry = lax.div(position, s.page)
            slot = lax.rem(position, s.page)
            page = load(ref["table"], (row, entry), seen)[:, None]
        else:
            page, slot = row, lax.rem(position, s.page)
        at = (s.layer, page, slot[:, None], head, dims)
        mask = seen[:, None] & in_dim
        key = load(ref["context_key"], at, mask).astype(q.dtype)
        value = load(ref["context_value"], at, mask)
        allowed = jnp.broadcast_to(seen[None, :], (tiling.query_rows, tiling.keys))
        if s.window is not None:
            near = position[None, :] > (length + column - s.window)[:, None]
            allowed = allowed & near
        return _update(state, q, key, value, allowed, scale)

    # Block columns that some query of the tile sees.
    block_low, block_high = jnp.int32(0), live
    if s.causal and "ancestors" not in ref:
        block_high = jnp.minimum(live, last + 1)
    if s.window is not None:
        block_low = jnp.maximum(first - s.window + 1, 0)
        block_high = jnp.minimum(block_high, last + s.window)

    def attend_block(step, state, q):
        other = block_low + step * tiling.block_keys + jnp.arange(tiling.block_keys)
        seen = other < block_high
        at = (row, other[:, None], head, dims)
        mask = seen[:, None] & in_dim
        key = load(ref["block_key"], at, mask).astype(q.dtype)
        value = load(ref["block_value"], at, mask)
        distance = column[:, None] - other[None, :]
        allowed = jnp.broadcast_to(seen[None, :], distance.shape)
        if "ancestors" in ref:
            bits = load(ref["ancestors"], (row, column), query_live)
            # Shifts beyond 31 are undefined, and so masked by `seen` first.
            shift = jnp.where(seen, other, 0)[None, :]
            bits = lax.shift_right_logical(*jnp.broadcast_arrays(bits[:, None], shift))
            allowed = allowed & ((bits & 1) == 1)
        elif s.causal:
            allowed = allowed & (distance >= 0)
        if s.window is not None:
            allowed = allowed & (distance < s.window) & (distance > -s.window)
        return _update(state, q, key, value, allowed, scale)

    @pl.when(span_index < _spans_used(s, low, high))
    def _():
        q = load(ref["q"], address, query_live[:, None] & in_dim)
        start = low + span_index * tiling.span
        count = jnp.clip(high - start, 0, tiling.span)
        state = (
            jnp.full(tiling.query_rows, MASKED, jnp.float32),
            jnp.zeros(tiling.query_rows, jnp.float32),
            jnp.zeros((tiling.query_rows, dims.shape[1]), jnp.float32),
        )
        state = lax.fori_loop(
            0,
            lax.div(count + tiling.keys - 1, tiling.keys),
            functools.partial(attend_context, q=q, start=start),
            state,
        )
        block = jnp.where((span_index == 0) & (first < live), block_high - block_low, 0)
        top, total, mixed = lax.fori_loop(
            0,
            lax.div(jnp.maximum(block, 0) + tiling.block_keys - 1, tiling.block_keys),
            functools.partial(attend_block, q=q),
            state,
        )
        if tiling.spans == 1:
            mixed = _normalised(mixed, total, query_live)
            store(outputs[0], address, mixed.astype(outputs[0].dtype), exists[:, None] & in_dim)
        else:
            at = jnp.arange(tiling.query_rows)
            for output, stat in zip(outputs[:2], (top, total), strict=True):
                store(output, (row, place, span_index, at), stat, query_live)
            mask = query_live[:, None] & in_dim
            store(outputs[2], (row, place, span_index, at[:, None], dims), mixed, mask)


def _normalised(mixed, total, query_live):
    # A live query sees itself, so that its total is positive; dead ones must not give 0 / 0.
    total = jnp.where(query_live & (total != 0), total, 1.0)
    return jnp.where(query_live[:, None], mixed / total[:, None], 0.0)


_COMBINED_ROWS = 4  # small, so that one row of a batch still makes many programs


def _combine_kernel(lengths, live, tops, totals, mixes, output, *, statics):
    """Joins the partial sums of the spans that were used; the others hold garbage."""
    s, tiling = statics, statics.tiling
    part, place, row = (pl.program_id(axis) for axis in range(3))
    head, tile = lax.div(place, tiling.query_tiles), lax.rem(place, tiling.query_tiles)
    _, _, low, high = _extent(s, tile, lengths[row], live[row])
    start = part * _COMBINED_ROWS
    column, member, exists = _query_rows(s, tile, start, _COMBINED_ROWS)
    query_live = exists & (column < live[row])
    at = start + jnp.arange(_COMBINED_ROWS)
    dims = jnp.arange(padded_size(s.dim, 16))[None, :]
    in_dim = dims < s.dim

    def join(index, state):
        top, total, mixed = state
        other_top = load(tops, (row, place, index, at), query_live, MASKED)
        other_total = load(totals, (row, place, index, at), query_live)
        other = load(mixes, (row, place, index, at[:, None], dims), query_live[:, None] & in_dim)
        new_top = jnp.maximum(top, other_top)
        mine, theirs = jnp.exp2(top - new_top), jnp.exp2(other_top - new_top)
        total = total * mine + other_total * theirs
        return new_top, total, mixed * mine[:, None] + other * theirs[:, None]

    top = jnp.full(_COMBINED_ROWS, MASKED, jnp.float32)
    zero = jnp.zeros((_COMBINED_ROWS, dims.shape[1]), jnp.float32)
    spans = _spans_used(s, low, high)
    _, total, mixed = lax.fori_loop(0, spans, join, (top, jnp.zeros_like(top), zero))
    mixed = _normalised(mixed, total, query_live).astype(output.dtype)
    heads = head * s.group + member[:, None]
    store(output, (row, column[:, None], heads, dims), mixed, exists[:, None] & in_dim)
