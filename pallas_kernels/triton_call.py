"""What the Pallas kernels share: the call, sizes the GPU can take, loads that cannot stray.

The kernels are written for Pallas' Triton backend, whose values all have power-of-two sizes.
The interpreter is more lenient than a GPU (it clamps an index that strays, and a masked load
without a fill value ignores its mask), so the kernels go through these helpers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


def padded_size(size: int, least: int = 1) -> int:
    """The smallest power of two that is at least `size` and `least`."""
    return max(pl.next_power_of_2(size), least)


def triton_call(
    kernel: Callable,
    *,
    name: str,
    out_shape: Any,
    grid: tuple[int, ...],
    operands: Sequence[jax.Array],
    num_warps: int,
    num_stages: int = 1,
    aliases: dict[int, int] | None = None,
    interpret: bool = False,
) -> Any:
    """Runs `kernel(*operand_refs, *output_refs)` once per point of `grid`.

    Every ref is the whole array in device memory: the kernels compute their own addresses, since
    a block specification that does not divide an array is not masked by the lowering.

    Args:
      kernel: the body; statics are bound already.
      name: what profilers and reports show.
      out_shape: a `jax.ShapeDtypeStruct` or a tuple of them.
      grid: at most three sizes; axis 0 runs fastest.
      operands: arrays, at least 1-dimensional.
      num_warps: warps of a program, a power of two.
      num_stages: depth of the software pipeline of a loop over loads.
      aliases: operand index -> output index that shares its memory. Such a buffer must be
        touched through the output ref only.
      interpret: run as an XLA program on any backend.

    Returns:
      The outputs, in the structure of `out_shape`.
    """
    return pl.pallas_call(
        kernel,
        name=name,
        out_shape=out_shape,
        grid=grid,
        input_output_aliases=aliases or {},
        # Without parameters of this type older versions pick another backend.
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
    )(*operands)


def load(ref: Any, index: tuple, mask: jax.Array, fill: float | int = 0) -> jax.Array:
    """`ref[index]` where `mask`, else `fill`.

    Where the mask is False nothing is read, so that the index may point anywhere there. `index`
    holds scalars or arrays that broadcast to the mask's shape; no slices.
    """
    return plt.load(ref.at[index], mask=mask, other=fill)


def store(ref: Any, index: tuple, value: jax.Array, mask: jax.Array) -> None:
    """Writes `value` to `ref[index]` where `mask`; nothing elsewhere.

    Interpreted, a lane whose mask is False writes back what stood at its index, and would undo a
    lane that writes there: it must point somewhere else, or past the end, which is dropped.
    """
    plt.store(ref.at[index], value, mask=mask)


def bfloat16_rounded(x: jax.Array) -> jax.Array:
    """Float32 `x` rounded to the nearest bfloat16, ties to even, still as float32.

    By integers and not by two casts: the compiler of an interpreted kernel may drop such a pair.
    Adding 0x7fff and the lowest kept bit carries into the kept half exactly when the dropped half
    is above a tie, or at a tie whose kept bit is odd. NaN is left alone: the carry could make it
    an infinity.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & jnp.uint32(0xFFFF0000)
    return jnp.where(x == x, jax.lax.bitcast_convert_type(bits, jnp.float32), x)


def with_xla_gradient(kernel: Callable, xla: Callable) -> Callable:
    """`kernel` forward, the gradient of `xla` backward (a Pallas call has none of its own).

    Both take the same arrays by position and the same statics by keyword, except that only the
    kernel takes `interpret`.
    """

    @functools.wraps(kernel)
    def call(*arrays, interpret: bool = False, **statics):
        forward = jax.custom_vjp(functools.partial(kernel, interpret=interpret, **statics))

        def keep(*arrays):
            return forward(*arrays), arrays

        def backward(arrays, cotangent):
            return jax.vjp(functools.partial(xla, **statics), *arrays)[1](cotangent)

        forward.defvjp(keep, backward)
        return forward(*arrays)

    return call
