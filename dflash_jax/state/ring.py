"""Cyclic key/value rings of the local draft layers.

Position p lives in slot `p mod S`. With frontier F the live interval is `[max(0, F - S), F)`;
bytes outside it are unreachable. The frontier itself is sequence metadata, not ring content.
"""

from typing import NamedTuple

import jax.numpy as jnp

from dflash_jax.config import DraftConfig
from dflash_jax.precision import ring_dtypes
from dflash_jax.typing import Array, DType, Float


class RingKV(NamedTuple):
    """key, value `[L, B, S, K, D]`; L counts local layers only."""

    key: Float[Array, "L B S K D"]
    value: Float[Array, "L B S K D"]

    @property
    def slots(self) -> int:
        return self.key.shape[2]


def init_ring(config: DraftConfig, rows: int, dtype: DType) -> RingKV:
    """Empty rings of `sliding_window` slots for every local layer."""
    shape = (
        len(config.local_layers),
        rows,
        config.sliding_window,
        config.num_key_value_heads,
        config.head_dim,
    )
    key_dtype, value_dtype = ring_dtypes(dtype)
    return RingKV(jnp.zeros(shape, key_dtype), jnp.zeros(shape, value_dtype))
