"""Which dtype each role has, given the dtype the models run in."""

import jax.numpy as jnp

from dflash_jax.typing import DType

COMPUTE_DTYPES = ("float32", "bfloat16")


def compute_dtype(name: str) -> DType:
    """The activation dtype named `name`.

    Raises:
      ValueError: not one of `COMPUTE_DTYPES`.
    """
    if name not in COMPUTE_DTYPES:
        raise ValueError(f"dtype: got {name!r}, expected one of {', '.join(COMPUTE_DTYPES)}")
    return jnp.dtype(name)


def ring_dtypes(dtype: DType) -> tuple[DType, DType]:
    """(key, value) dtypes of the draft's rings: bfloat16 keys and float16 values in bfloat16."""
    if jnp.dtype(dtype) == jnp.bfloat16:
        return jnp.bfloat16, jnp.float16
    return dtype, dtype
