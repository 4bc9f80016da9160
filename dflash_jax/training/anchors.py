"""Packed anchors: many draft blocks of one sequence in one forward.

An anchor at position p makes the block `[x_p, MASK x K]` at positions p..p+K. Its queries see
context features at positions < p (within the window on local layers) and their own block, never
another block. Blocks are extra batch rows to the draft; only attention knows their sequence.
"""

import jax.numpy as jnp
import numpy as np

from dflash_jax.config import DraftConfig
from dflash_jax.config.draft import FULL
from dflash_jax.draft.attention import Attend
from dflash_jax.typing import Array, Float, Int
from pallas_kernels.elementary import normed_key

_MASKED = -1e30


def draw_anchors(
    rows: int, count: int, first: int, length: int, draft_tokens: int, seed: int, step: int
) -> np.ndarray:
    """`[rows, count]` distinct anchors per row in `[first, length - draft_tokens)`, ascending."""
    choices = np.arange(first, length - draft_tokens)
    if len(choices) < count:
        raise ValueError(f"anchors: got {count}, expected at most {len(choices)}")
    random = np.random.default_rng((seed, step, 1))
    picked = random.permuted(np.tile(choices, (rows, 1)), axis=1)[:, :count]
    return np.sort(picked, axis=1).astype(np.int32)


def block_targets(
    tokens: Int[Array, "B T"], anchors: Int[Array, "B A"], draft_tokens: int
) -> Int[Array, "B A W"]:
    """Tokens at positions p..p+K of every block: column 0 the anchor, then the labels."""
    index = anchors[..., None] + jnp.arange(draft_tokens + 1)
    return jnp.take_along_axis(tokens[:, None, :], index, axis=2)


def attend_packed(
    config: DraftConfig,
    key: Float[Array, "L B T K D"],
    value: Float[Array, "L B T K D"],
    gain: Float[Array, "L D"],
    anchors: Int[Array, "B A"],
    width: int,
) -> Attend:
    """Attention of all blocks of all sequences; same visibility as decoding.

    Args:
      key, value, gain: raw context keys and values and key-norm gains from `DraftModel.context`.
    """
    batch, per_row = anchors.shape
    tokens = key.shape[2]
    position = jnp.arange(tokens)
    rotated = normed_key(
        key,
        gain[:, None, None, None],
        position,
        eps=config.rms_norm_eps,
        theta=config.rope_theta,
        rotary_dim=config.rotary_dim,
    )
    query_position = anchors[..., None] + jnp.arange(width)  # [B, A, W]
    past = position < anchors[..., None, None]  # [B, A, 1, T]
    column = jnp.arange(width)
    ahead = column - column[:, None]  # key column minus query column

    def attend(layer, query, block_key, block_value):
        heads, dim = query.shape[2:]
        kv_heads = block_key.shape[2]
        query = query.reshape(batch, per_row, width, kv_heads, heads // kv_heads, dim)
        block_key = block_key.reshape(batch, per_row, width, kv_heads, dim)
        block_value = block_value.reshape(batch, per_row, width, kv_heads, dim)

        seen = past
        in_block = jnp.ones((width, width), bool)
        if config.layer_types[layer] != FULL:
            near = query_position[..., None] - position < config.sliding_window
            seen = past & near
            in_block = jnp.abs(ahead) < config.sliding_window
        if config.layer_is_causal(layer):
            in_block = in_block & (ahead <= 0)

        query = query * dim**-0.5
        context = jnp.einsum("bawkgd,btkd->bkgawt", query, rotated[layer])
        own = jnp.einsum("bawkgd,bavkd->bkgawv", query, block_key)
        context = jnp.where(seen[:, None, None], context, _MASKED)
        own = jnp.where(in_block, own, _MASKED)
        scores = jnp.concatenate([context, own], axis=-1)
        weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        mixed = jnp.einsum("bkgawt,btkd->bawkgd", weights[..., :tokens], value[layer])
        mixed += jnp.einsum("bkgawv,bavkd->bawkgd", weights[..., tokens:], block_value)
        return mixed.reshape(batch * per_row, width, heads, dim)

    return attend
