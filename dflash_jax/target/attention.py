"""Gated full attention of Qwen3.5."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from dflash_jax.config import TargetConfig
from dflash_jax.layers import Linear, RMSNorm
from dflash_jax.typing import Array, DType, Float
from pallas_kernels.elementary import apply_rotary

# (q [B,T,N,D], key [B,T,K,D], value [B,T,K,D]) -> [B,T,N,D]
Attend = Callable[[Array, Array, Array], Array]


class GatedAttention(nn.Module):
    """q_proj holds, per head, the query and then its gate; q and k are normed and rotated.

    The output of each head is multiplied by the sigmoid of its gate before o_proj. Where the
    context lives is not known here: `attend` closes over it.
    """

    config: TargetConfig
    dtype: DType = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T H"], rotary: tuple[Array, Array], attend: Attend
    ) -> tuple[Float[Array, "B T H"], Float[Array, "B T K D"], Float[Array, "B T K D"]]:
        """Returns the output and this block's key (normed, rotated) and value."""
        c = self.config
        heads, kv_heads, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        batch, tokens, _ = x.shape

        def norm(name):
            return RMSNorm(dim, c.rms_norm_eps, zero_centred=True, dtype=self.dtype, name=name)

        both = Linear(heads * dim * 2, self.dtype, name="q_proj")(x)
        query, gate = jnp.split(both.reshape(batch, tokens, heads, 2 * dim), 2, axis=-1)
        key = Linear(kv_heads * dim, self.dtype, name="k_proj")(x)
        value = Linear(kv_heads * dim, self.dtype, name="v_proj")(x)
        key = key.reshape(batch, tokens, kv_heads, dim)
        value = value.reshape(batch, tokens, kv_heads, dim)
        query = apply_rotary(norm("q_norm")(query), *rotary)
        key = apply_rotary(norm("k_norm")(key), *rotary)
        mixed = attend(query, key, value) * jax.nn.sigmoid(gate)
        out = Linear(c.hidden_size, self.dtype, name="o_proj")(mixed.reshape(batch, tokens, -1))
        return out, key, value
