"""The draft's context: committed target features as keys and values in rings and pages."""

import jax.numpy as jnp

from dflash_jax.config import DraftConfig
from dflash_jax.draft.attention import Attend
from dflash_jax.draft.model import DraftModel
from dflash_jax.state.paged import append
from dflash_jax.state.ring import RingKV
from dflash_jax.state.sequence import DraftContext
from dflash_jax.typing import Array, DType, Float, Int, Params
from pallas_kernels.context_kv_materialize import context_kv_materialize
from pallas_kernels.elementary import normed_key
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.sliding_window_attention import sliding_window_attention

# Modules whose weights serve both roles, context and query block (specification, context K/V).
# Where one role is represented apart, these are what is held a second time.
CONTEXT_ROLE = ("k_proj", "v_proj")


def overlaid(params: Params, role: Params | None) -> Params:
    """`params` with the leaves of `role` in place of its own; None changes nothing."""
    if not isinstance(role, dict):
        return params if role is None else role
    return {name: overlaid(value, role.get(name)) for name, value in params.items()}


def materialize(
    config: DraftConfig,
    params: Params,
    context: DraftContext,
    features: Float[Array, "B T F"],
    start: Int[Array, "B"],
    count: Int[Array, "B"],
    dtype: DType,
) -> DraftContext:
    """Adds the first `count[b]` feature columns at positions `start[b] + i`.

    Prompt tokens do not run through the draft's stack: features are projected to keys and
    values and stored. Columns from `count[b]` on are never stored.

    Args:
      params: the draft's, with the K/V projections of the context role.
      context: its dtypes are what is stored.
      dtype: of the activations up to the projections.
    """
    model = DraftModel(config, dtype)
    key, value, gain = model.apply({"params": params}, features, method="context")
    rope = dict(eps=config.rms_norm_eps, theta=config.rope_theta, rotary_dim=config.rotary_dim)
    ring, pages = context
    if ring is not None:
        local = jnp.asarray(config.local_layers)
        ring = RingKV(
            *context_kv_materialize(
                key[local], value[local], gain[local], ring.key, ring.value, start, count, **rope
            )
        )
    if pages is not None:
        full = jnp.asarray(config.full_layers)
        positions = start[:, None] + jnp.arange(features.shape[1])
        rotated = normed_key(key[full], gain[full][:, None, None, None], positions, **rope)
        pages = append(pages, rotated, value[full], start, count)
    return DraftContext(ring, pages)


def attend_context(
    config: DraftConfig, context: DraftContext, frontier: Int[Array, "B"], live: Int[Array, "B"]
) -> Attend:
    """Attention of a block at positions `frontier[b] + i` over the context and itself.

    Args:
      frontier: F_ctx, which equals F when a block is drafted.
      live: columns that exist; the others are never keys.
    """

    def attend(layer, query, key, value):
        causal = config.layer_is_causal(layer)
        if layer in config.local_layers:
            ring, index = context.ring, config.local_layers.index(layer)
            return sliding_window_attention(
                query, key, value, ring.key, ring.value, frontier, live,
                layer=index, causal=causal,
            )  # fmt: skip
        pages, index = context.pages, config.full_layers.index(layer)
        return paged_attention(
            query, key, value, pages.key, pages.value, pages.block_table, frontier, live,
            layer=index, causal=causal,
        )  # fmt: skip

    return attend
