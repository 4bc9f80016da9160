"""DFlash2's dynamic grouped convolution around a branch (attention or MLP)."""

import flax.linen as nn
import jax.numpy as jnp

from dflash_jax.config import DraftConfig
from dflash_jax.layers import Linear
from dflash_jax.typing import Array, DType, Float
from pallas_kernels import dynamic_grouped_conv


class DynamicConv(nn.Module):
    """`prepare` before the branch, `finish` after it, with one shared delta projection.

    Coefficient of tap t and channel c: `base_kernel[side, t, c]` plus an increment computed from
    the branch's normalised input, shared by the channels of a group. Side 0 acts on the input,
    side 1 on the branch's output. No history across blocks.
    """

    config: DraftConfig
    dtype: DType = jnp.float32

    def setup(self):
        c = self.config
        taps = c.conv_kernel_size
        self.base_kernel = self.param("base_kernel", _identity, (2, taps, c.hidden_size))
        self.kernel_projection = Linear(2 * taps * c.conv_groups, self.dtype, zero=True)

    def prepare(
        self, x: Float[Array, "B W H"]
    ) -> tuple[Float[Array, "B W H"], Float[Array, "B W taps G"]]:
        """Convolved input of the branch, and the output side's coefficients increments."""
        c = self.config
        delta = self.kernel_projection(x)
        delta = delta.reshape(*x.shape[:2], 2, c.conv_kernel_size, c.conv_groups)
        return dynamic_grouped_conv.prepare(x, self.base_kernel, delta)

    def finish(
        self,
        branch: Float[Array, "B W H"],
        residual: Float[Array, "B W H"],
        finish_delta: Float[Array, "B W taps G"],
    ) -> Float[Array, "B W H"]:
        """`residual + Conv(branch)` with the increments that `prepare` made."""
        return dynamic_grouped_conv.finish(branch, residual, self.base_kernel, finish_delta)


def _identity(key, shape):
    """Tap 0 is one and the others zero: the layer starts as DFlash's."""
    del key
    return jnp.zeros(shape, jnp.float32).at[:, 0].set(1.0)
