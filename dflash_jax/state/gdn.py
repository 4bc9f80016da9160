"""Gated DeltaNet state, verify records and Fold.

The state advances only by `fold` (decode) or by a chunked prefill; a verify pass reads it and
leaves records, from which Fold re-runs the accepted transitions bit for bit.
"""

from typing import NamedTuple

import jax.numpy as jnp

from dflash_jax.config import TargetConfig
from dflash_jax.typing import Array, DType, Float, Int
from pallas_kernels import gated_delta_rule


class GDNState(NamedTuple):
    """recurrent `[L, B, Hv, Dk, Dv]` float32; conv `[L, B, width - 1, C]`, oldest first.

    L counts GDN layers only. `conv` holds the last raw columns of the projection, zeros where
    history is shorter.
    """

    recurrent: Float[Array, "L B Hv Dk Dv"]
    conv: Float[Array, "L B w C"]


class GDNRecords(NamedTuple):
    """What Fold needs of a verify block, per GDN layer; round scratch.

    key is raw (before normalisation); g is the log decay, beta the write strength; conv holds
    the raw projected columns. Queries do not change the state and are not recorded.
    """

    key: Float[Array, "L B W Hk Dk"]
    value: Float[Array, "L B W Hv Dv"]
    g: Float[Array, "L B W Hv"]
    beta: Float[Array, "L B W Hv"]
    conv: Float[Array, "L B W C"]


def init_gdn(config: TargetConfig, rows: int, dtype: DType) -> GDNState:
    """The state before any token."""
    layers = len(config.linear_layers)
    heads = config.linear_num_value_heads
    dims = (config.linear_key_head_dim, config.linear_value_head_dim)
    history = config.linear_conv_kernel_dim - 1
    return GDNState(
        jnp.zeros((layers, rows, heads, *dims), jnp.float32),
        jnp.zeros((layers, rows, history, config.conv_channels), dtype),
    )


def advance_conv(
    history: Float[Array, "*L B w C"], columns: Float[Array, "*L B T C"], count: Int[Array, "B"]
) -> Float[Array, "*L B w C"]:
    """The last w columns of `history ++ columns[:count]`.

    With w = 3 and count = 1: slots 1, 2 of the history, then column 0. count = 0 returns the
    history itself.
    """
    width = history.shape[-2]
    joined = jnp.concatenate([history, columns.astype(history.dtype)], axis=-2)
    index = count[:, None] + jnp.arange(width)
    index = index.reshape((1,) * (history.ndim - 3) + (*index.shape, 1))
    return jnp.take_along_axis(joined, index, axis=-2)


def fold(state: GDNState, records: GDNRecords, count: Int[Array, "B"]) -> GDNState:
    """Commits the first `count[b]` recorded columns of each row."""
    recurrent = gated_delta_rule.fold(
        state.recurrent, records.key, records.value, records.g, records.beta, count
    )
    return GDNState(recurrent, advance_conv(state.conv, records.conv, count))
