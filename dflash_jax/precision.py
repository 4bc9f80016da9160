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


def separate_dtype(field: str, name: str | None, shared: str) -> str | None:
    """The dtype of a role that may be represented apart from the one it shares weights with.

    Args:
      field: what the user calls it, for the error.
      name: what was asked for; None shares.
      shared: the dtype of the other role.

    Returns:
      None where both are represented alike, and so share; else `name`.

    Raises:
      ValueError: not one of `COMPUTE_DTYPES`.
    """
    if name is None or name == shared:
        return None
    if name not in COMPUTE_DTYPES:
        known = ", ".join(COMPUTE_DTYPES)
        raise ValueError(f"{field}: got {name!r}, expected one of {known} or None")
    return name


def ring_dtypes(dtype: DType) -> tuple[DType, DType]:
    """(key, value) dtypes of the draft's rings: bfloat16 keys and float16 values in bfloat16."""
    if jnp.dtype(dtype) == jnp.bfloat16:
        return jnp.bfloat16, jnp.float16
    return dtype, dtype
