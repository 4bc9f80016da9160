"""The Gated DeltaNet mixer: projection, causal convolution, gated delta rule, gated norm."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dflash_jax.config import TargetConfig
from dflash_jax.layers import Linear, RMSNorm
from dflash_jax.state.gdn import GDNRecords, advance_conv
from dflash_jax.typing import Array, DType, Float, Int
from pallas_kernels import gated_delta_rule


class DepthwiseConv(nn.Module):
    """Causal depthwise convolution over `history ++ columns`; weight `(C, 1, width)`."""

    width: int
    dtype: DType = jnp.float32

    @nn.compact
    def __call__(self, joined: Float[Array, "B wT C"], tokens: int) -> Float[Array, "B T C"]:
        channels = joined.shape[-1]
        init = nn.initializers.uniform(self.width**-0.5)
        weight = self.param("weight", init, (channels, 1, self.width), self.dtype)[:, 0]
        # Output t sees joined[t : t + width]; the last tap is the token itself.
        return sum(joined[:, i : i + tokens] * weight[:, i] for i in range(self.width))


def init_a_log(key: Array, shape: tuple[int, ...]) -> Array:
    """log of a decay rate drawn uniformly from [1, 16)."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1.0, 16.0))


def init_dt_bias(key: Array, shape: tuple[int, ...]) -> Array:
    """Inverse softplus of a step drawn log-uniformly from [1e-3, 1e-1)."""
    low, high = jnp.log(1e-3), jnp.log(1e-1)
    step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, low, high))
    return step + jnp.log(-jnp.expm1(-step))


class GatedDeltaNet(nn.Module):
    """Value head j reads q/k head `j // (Hv / Hk)`; gates, norms and state are float32."""

    config: TargetConfig
    dtype: DType = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T H"],
        recurrent: Float[Array, "B Hv Dk Dv"] | Float[Array, "L B Hv Dk Dv"],
        conv: Float[Array, "B w C"],
        live: Int[Array, "B"],
        *,
        record: bool,
        layer: int | None = None,
    ):
        """Mixes the first `live[b]` columns of each row.

        Args:
          layer: which of the L layers `recurrent` holds is this one's; None: it has no such axis.

        Returns:
          `(out, records)` with `record`: the state is only read, and `records` is one layer of
          `GDNRecords`. Otherwise `(out, (recurrent, conv))`: the state after the live columns.
        """
        c = self.config
        batch, tokens, _ = x.shape
        key_shape = (batch, tokens, c.linear_num_key_heads, c.linear_key_head_dim)
        value_shape = (batch, tokens, c.linear_num_value_heads, c.linear_value_head_dim)

        columns = Linear(c.conv_channels, self.dtype, name="in_proj_qkv")(x)
        joined = jnp.concatenate([conv, columns.astype(conv.dtype)], axis=1)
        mixed = nn.silu(
            DepthwiseConv(c.linear_conv_kernel_dim, self.dtype, name="conv1d")(joined, tokens)
        )
        query, key, value = jnp.split(mixed, [c.key_width, 2 * c.key_width], axis=-1)
        query, key = query.reshape(key_shape), key.reshape(key_shape)
        value = value.reshape(value_shape)

        heads = (c.linear_num_value_heads,)
        a_log = self.param("A_log", init_a_log, heads)
        dt_bias = self.param("dt_bias", init_dt_bias, heads)
        step = Linear(heads[0], self.dtype, name="in_proj_a")(x).astype(jnp.float32)
        g = -jnp.exp(a_log) * jax.nn.softplus(step + dt_bias)
        beta = Linear(heads[0], self.dtype, name="in_proj_b")(x).astype(jnp.float32)
        beta = jax.nn.sigmoid(beta)

        if record:
            output = gated_delta_rule.verify(
                query, key, value, g, beta, recurrent, live, layer=layer
            )
            after = GDNRecords(key, value, g, beta, columns)
        else:
            before = recurrent if layer is None else recurrent[layer]
            output, state = gated_delta_rule.prefill(query, key, value, g, beta, before, live)
            after = (state, advance_conv(conv, columns, live))

        # This norm stores its gain itself and comes before the gate.
        norm = RMSNorm(value_shape[-1], c.rms_norm_eps, dtype=self.dtype, name="norm")
        z = Linear(c.value_width, self.dtype, name="in_proj_z")(x).reshape(value_shape)
        gated = norm(output) * jax.nn.silu(z.astype(jnp.float32))
        gated = gated.astype(x.dtype).reshape(batch, tokens, -1)
        return Linear(c.hidden_size, self.dtype, name="out_proj")(gated), after
