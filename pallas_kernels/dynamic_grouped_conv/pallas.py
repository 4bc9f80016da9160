"""Pallas-Triton form: one program per column and span of channels, everything read once.

A program of `prepare` that also normalises takes the whole row, so that the mean of squares stays
inside it.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.triton_call import bfloat16_rounded, load, padded_size, store, triton_call

# Channels of a program: 8 per thread of 4 warps.
_SPAN = 1024


class _Span:
    """Channels `[SPAN]` of column i of row b; the grid is (span, column, row)."""

    def __init__(self, hidden: int, groups: int, size: int):
        self.row, self.column = pl.program_id(2), pl.program_id(1)
        self.channel = pl.program_id(0) * size + jnp.arange(size)
        self.on = self.channel < hidden
        self.width = hidden // groups
        self.group = self.channel // self.width

    def load(self, ref, back=0):
        """Column i - back of `ref[B, W, H]` in float32, zeros before column 0."""
        index = (self.row, self.column - back, self.channel)
        return load(ref, index, self.on & (self.column >= back)).astype(jnp.float32)

    def store(self, ref, value):
        """The store's cast is the rounding that the specification places here."""
        store(ref, (self.row, self.column, self.channel), value.astype(ref.dtype), self.on)

    def coefficient(self, base, delta, side, tap, *index):
        """`base[side, tap] + delta[..., tap, group]` per channel."""
        static = load(base, (side, tap, self.channel), self.on).astype(jnp.float32)
        index = (self.row, self.column, *index, tap, self.group)
        return static + load(delta, index, self.on).astype(jnp.float32)


def _prepare_kernel(x, base, delta, *refs, eps):
    # x, prepared [B, W, H]; base [2, taps, H]; delta [B, W, 2, taps, G]
    # finish_delta [B, W, taps, G]; norm_weight [H] before the outputs if eps is given
    *norm_weight, prepared, finish_delta = refs
    hidden, (taps, groups) = x.shape[2], delta.shape[3:]
    size = _SPAN if eps is None else padded_size(hidden)
    span = _Span(hidden, groups, size)

    def column(back):
        values = span.load(x, back)
        if eps is None:
            return values
        inverse = jax.lax.rsqrt(jnp.sum(values * values) / hidden + eps)
        weight = load(norm_weight[0], (span.channel,), span.on).astype(jnp.float32)
        values = weight * (values * inverse)
        # What the delta was projected from is represented in x.dtype.
        return bfloat16_rounded(values) if x.dtype == jnp.bfloat16 else values

    total = span.coefficient(base, delta, 0, 0, 0) * column(0)
    for tap in range(1, taps):
        total += span.coefficient(base, delta, 0, tap, 0) * column(tap)
    span.store(prepared, total)

    # The first channel of a group also stores the group's rounded increment of side 1.
    first = span.on & (span.channel % span.width == 0)
    group = jnp.where(first, span.group, groups)  # the others past the end: see `store`
    for tap in range(taps):
        at = (span.row, span.column, tap, group)
        value = load(delta, (span.row, span.column, 1, tap, group), first)
        store(finish_delta, at, value.astype(finish_delta.dtype), first)


def _finish_kernel(branch, residual, base, finish_delta, out):
    # branch, residual, out [B, W, H]; base [2, taps, H]; finish_delta [B, W, taps, G]
    taps, groups = finish_delta.shape[2:]
    span = _Span(branch.shape[2], groups, _SPAN)
    total = span.coefficient(base, finish_delta, 1, 0) * span.load(branch)
    for tap in range(1, taps):
        total += span.coefficient(base, finish_delta, 1, tap) * span.load(branch, tap)
    span.store(out, span.load(residual) + total)


def prepare(x, base, delta, norm_weight=None, *, eps=None, interpret=False):
    """See `api.prepare`."""
    rows, columns, hidden = x.shape
    whole = eps is not None
    return triton_call(
        functools.partial(_prepare_kernel, eps=eps),
        name="dynamic_conv_prepare",
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((rows, columns, *delta.shape[3:]), x.dtype),
        ),
        grid=(1 if whole else pl.cdiv(hidden, _SPAN), columns, rows),
        operands=(x, base, delta, norm_weight) if whole else (x, base, delta),
        num_warps=8 if whole else 4,
        interpret=interpret,
    )


def finish(branch, residual, base, finish_delta, *, interpret=False):
    """See `api.finish`."""
    rows, columns, hidden = branch.shape
    return triton_call(
        _finish_kernel,
        name="dynamic_conv_finish",
        out_shape=jax.ShapeDtypeStruct(residual.shape, residual.dtype),
        grid=(pl.cdiv(hidden, _SPAN), columns, rows),
        operands=(branch, residual, base, finish_delta),
        num_warps=4,
        interpret=interpret,
    )
