"""Attention of a draft layer; its K/V projections also make the context keys and values."""

from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp

from dflash_jax.config import DraftConfig
from dflash_jax.layers import Linear, RMSNorm
from dflash_jax.typing import Array, DType, Float
from pallas_kernels.elementary import apply_rotary

# (layer, q [B,W,N,D], key [B,W,K,D], value [B,W,K,D]) -> [B,W,N,D]
Attend = Callable[[int, Array, Array, Array], Array]


class DraftAttention(nn.Module):
    """Full-head rotary and plain head norms (Qwen3); no output gate, no bias."""

    config: DraftConfig
    layer: int
    dtype: DType = jnp.float32

    def setup(self):
        c = self.config
        self.q_proj = Linear(c.num_attention_heads * c.head_dim, self.dtype)
        self.k_proj = Linear(c.num_key_value_heads * c.head_dim, self.dtype)
        self.v_proj = Linear(c.num_key_value_heads * c.head_dim, self.dtype)
        self.o_proj = Linear(c.hidden_size, self.dtype)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype=self.dtype)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype=self.dtype)

    def _heads(self, x):
        return x.reshape(*x.shape[:-1], -1, self.config.head_dim)

    def project(
        self, c: Float[Array, "... H"], key_dtype: DType | None = None
    ) -> tuple[Array, Array]:
        """Raw key (in `key_dtype`) and value `[..., K, D]`: neither normed nor rotated.

        Weights held in another dtype than `c`, as a role of their own may be, give values of the
        wider one.
        """
        return self._heads(self.k_proj(c, key_dtype)), self._heads(self.v_proj(c))

    def __call__(
        self, x: Float[Array, "B W H"], rotary: tuple[Array, Array], attend: Attend
    ) -> Float[Array, "B W H"]:
        query = apply_rotary(self.q_norm(self._heads(self.q_proj(x))), *rotary)
        key, value = self.project(x)
        key = apply_rotary(self.k_norm(key), *rotary)
        mixed = attend(self.layer, query, key, value)
        return self.o_proj(mixed.reshape(*x.shape[:-1], -1))
