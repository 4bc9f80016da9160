"""The op at real shapes."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.dynamic_grouped_conv.api import finish, prepare
from pallas_kernels.shapes import GEOMETRIES, Case, Draft

_TAPS = 2
_BASE_BYTES = 4  # static coefficients are float32


def _operands(key, draft: Draft, rows: int, dtype, side: str):
    keys = jax.random.split(key, 4)
    groups = draft.hidden // draft.conv_group
    x = jax.random.normal(keys[0], (rows, draft.columns, draft.hidden), dtype)
    base = jax.random.normal(keys[1], (2, _TAPS, draft.hidden), jnp.float32)
    if side == "finish":
        delta = jax.random.normal(keys[2], (rows, draft.columns, _TAPS, groups), dtype)
        return x, jax.random.normal(keys[3], x.shape, dtype), base, delta
    delta = jax.random.normal(keys[2], (rows, draft.columns, 2, _TAPS, groups), dtype)
    if side == "prepare_normed":
        return x, base, delta, jax.random.normal(keys[3], (draft.hidden,), dtype)
    return x, base, delta


def _case(geometry, rows: int, side: str) -> Case:
    draft, dtype = geometry.draft, jnp.dtype(geometry.dtype)
    columns = rows * draft.columns
    block = columns * draft.hidden * dtype.itemsize
    increments = columns * _TAPS * (draft.hidden // draft.conv_group) * dtype.itemsize
    base = _TAPS * draft.hidden * _BASE_BYTES
    gain = draft.hidden * dtype.itemsize if side == "prepare_normed" else 0
    # prepare reads the increments of both sides and passes one on; finish also reads a residual.
    rest = block + increments if side == "finish" else 3 * increments + block
    run = prepare
    if side == "finish":
        run = finish
    elif side == "prepare_normed":
        run = functools.partial(prepare, eps=1e-6)
    return Case(
        op=f"dynamic_grouped_conv.{side}",
        shape=f"{geometry.name} B={rows}",
        run=run,
        operands=functools.partial(_operands, draft=draft, rows=rows, dtype=dtype, side=side),
        minimum_bytes=block + rest + base + gain + (block if side == "finish" else 0),
        # A program reads one column, the one before it, and the coefficients of its channels.
        moved_bytes=(
            rows * (2 * draft.columns - 1) * draft.hidden * dtype.itemsize
            + rest
            + columns * (base + _TAPS * gain)
            + (block if side == "finish" else 0)
        ),
        # Coefficient, product and sum per tap.
        flops=3 * _TAPS * columns * draft.hidden,
    )


def cases() -> Iterator[Case]:
    """Geometries of DFlash2; `prepare_normed` takes the RMSNorm in."""
    for geometry in GEOMETRIES:
        if geometry.draft.conv_group:
            for rows in geometry.rows:
                for side in ("prepare", "prepare_normed", "finish"):
                    yield _case(geometry, rows, side)
