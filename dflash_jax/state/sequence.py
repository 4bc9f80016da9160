"""The state of B sequences: one explicit pytree that advances only by whole transactions."""

from typing import NamedTuple

import jax.numpy as jnp

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.state.counts import TokenCounts, init_counts
from dflash_jax.state.gdn import GDNState, init_gdn
from dflash_jax.state.paged import PagedKV, init_paged
from dflash_jax.state.ring import RingKV, init_ring
from dflash_jax.typing import Array, DType, Float, Int, UInt32

PAGE_SIZE = 64


class TargetCache(NamedTuple):
    """Committed target state of all rows; how far it reaches (F) is sequence metadata."""

    kv: PagedKV
    gdn: GDNState


class DraftContext(NamedTuple):
    """ring of the local layers, pages of the full layers; None where there are no such layers.

    Both hold positions `[0, F_ctx)` (the ring its last S of them); F_ctx is sequence metadata.
    """

    ring: RingKV | None
    pages: PagedKV | None


class SequenceState(NamedTuple):
    """Everything that outlives a round.

    frontier: F, tokens the target has processed: positions `[0, F)`.
    context_frontier: F_ctx <= F, positions whose features are in the draft context.
    anchor: x_F, chosen but not processed.
    hidden: continuation hidden, the final-norm output at position F - 1.
    seed: the request's random seed; with an absolute position it names every random draw.
    target: committed target state.
    draft: draft context; None without a draft.
    pending: features of positions `[F_ctx, F)` in its first `F - F_ctx` columns; None without a
      draft. Survives commit until `catch_up`, and is never checkpoint payload.
    counts: tokens of the prompt and those published, which penalties need.
    """

    frontier: Int[Array, "B"]
    context_frontier: Int[Array, "B"]
    anchor: Int[Array, "B"]
    hidden: Float[Array, "B H"]
    seed: UInt32[Array, "B"]
    target: TargetCache
    draft: DraftContext | None
    pending: Float[Array, "B W F"] | None
    counts: TokenCounts


def init_cache(
    config: TargetConfig,
    rows: int,
    capacity: int,
    page_size: int,
    dtype: DType,
    pages: int | None = None,
) -> TargetCache:
    """An empty target cache; `capacity` is in tokens per row (0 for training)."""
    kv = init_paged(
        len(config.full_layers),
        rows,
        capacity,
        config.num_key_value_heads,
        config.head_dim,
        page_size,
        dtype,
        pages,
    )
    return TargetCache(kv, init_gdn(config, rows, dtype))


def init_context(
    config: DraftConfig,
    rows: int,
    capacity: int,
    page_size: int,
    dtype: DType,
    pages: int | None = None,
) -> DraftContext:
    """An empty draft context; `capacity` in tokens per row concerns full layers only."""
    ring = init_ring(config, rows, dtype) if config.local_layers else None
    pool = None
    if config.full_layers:
        pool = init_paged(
            len(config.full_layers),
            rows,
            capacity,
            config.num_key_value_heads,
            config.head_dim,
            page_size,
            dtype,
            pages,
        )
    return DraftContext(ring, pool)


def init_sequences(
    target: TargetConfig,
    draft: DraftConfig | None,
    seed: UInt32[Array, "B"],
    capacity: int,
    block_width: int,
    dtype: DType,
    page_size: int = PAGE_SIZE,
    pages: int | None = None,
    context_dtype: DType | None = None,
) -> SequenceState:
    """B empty sequences of up to `capacity` tokens; their blocks are `block_width` wide.

    Args:
      pages: of every paged store, owned by no row yet; None gives each row its own.
      context_dtype: the draft context's, where it is not `dtype`.
    """
    rows = seed.shape[0]
    zeros = jnp.zeros(rows, jnp.int32)
    context = pending = None
    if draft is not None:
        own = context_dtype or dtype
        context = init_context(draft, rows, capacity, page_size, own, pages)
        features = len(draft.target_layer_ids) * target.hidden_size
        pending = jnp.zeros((rows, block_width, features), dtype)
    return SequenceState(
        frontier=zeros,
        context_frontier=jnp.zeros_like(zeros),
        anchor=jnp.zeros_like(zeros),
        hidden=jnp.zeros((rows, target.hidden_size), dtype),
        seed=seed,
        target=init_cache(target, rows, capacity, page_size, dtype, pages),
        draft=context,
        pending=pending,
        counts=init_counts(rows, target.vocab_size),
    )
