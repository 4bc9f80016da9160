"""Rotary tables of the target: partial rotation with interleaved position axes (MRoPE)."""

import jax.numpy as jnp

from dflash_jax.config import TargetConfig
from dflash_jax.typing import Array, Float, Int
from pallas_kernels.elementary import rotary_tables


def mrope_tables(
    config: TargetConfig, positions: Int[Array, "*axes B T"]
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Cosines and sines per rotary frequency.

    Args:
      config: gives theta, the rotary dimension and the sections.
      positions: `[B, T]` for text (the three axes are equal), or `[3, B, T]` for (t, h, w).
        Frequency i takes h if `i % 3 == 1 and i < 3 * section[1]`, w if `i % 3 == 2 and
        i < 3 * section[2]`, else t.
    """
    cos, sin = rotary_tables(positions, config.rope_theta, config.rotary_dim)
    if positions.ndim == 2:
        return cos, sin
    frequency = jnp.arange(config.rotary_dim // 2)
    _, height, width = config.mrope_section
    axis = jnp.where((frequency % 3 == 1) & (frequency < 3 * height), 1, 0)
    axis = jnp.where((frequency % 3 == 2) & (frequency < 3 * width), 2, axis)
    pick = axis[None, None, None, :]
    return (
        jnp.take_along_axis(cos, pick, axis=0)[0],
        jnp.take_along_axis(sin, pick, axis=0)[0],
    )
