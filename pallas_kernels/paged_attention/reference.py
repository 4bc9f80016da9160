"""The definition: the context laid out by position, one dense boolean mask."""

import jax
import jax.numpy as jnp


def paged_attention(
    q,
    block_key,
    block_value,
    key_pages,
    value_pages,
    block_table,
    lengths,
    live,
    ancestors,
    *,
    layer,
    causal,
    scale,
):
    """See `api.paged_attention`; plain float32."""
    tokens, heads = q.shape[1:3]
    pages, page = key_pages.shape[1:3]
    repeats = heads // block_key.shape[2]

    context_position = jnp.arange(block_table.shape[1] * page)
    table = jnp.clip(block_table, 0, pages - 1)  # what an unused entry reads is masked below
    page_id = table[:, context_position // page]
    context_key = key_pages[layer, page_id, context_position % page]
    context_value = value_pages[layer, page_id, context_position % page]
    in_context = context_position < lengths[:, None]
    column_live = jnp.arange(tokens) < live[:, None]
    alive = jnp.concatenate([in_context, column_live], axis=1)

    def joined(context, block):
        both = [context.astype(jnp.float32), block.astype(jnp.float32)]
        both = jnp.concatenate(both, axis=1)
        return jnp.where(alive[..., None, None], both, 0.0).repeat(repeats, axis=2)

    key, value = joined(context_key, block_key), joined(context_value, block_value)
    query_position = lengths[:, None] + jnp.arange(tokens)
    position = jnp.concatenate(
        [jnp.broadcast_to(context_position, in_context.shape), query_position], axis=1
    )
    allowed = jnp.broadcast_to(alive[:, None, :], (*query_position.shape, alive.shape[1]))
    if ancestors is not None:
        bits = jnp.unpackbits(ancestors.view(jnp.uint8), axis=-1, bitorder="little")
        tree = bits.reshape(*ancestors.shape, 32)[:, :, :tokens].astype(bool)
        context = jnp.ones((*tree.shape[:2], context_position.size), bool)
        allowed = allowed & jnp.concatenate([context, tree], axis=2)
    elif causal:
        allowed = allowed & (query_position[:, :, None] >= position[:, None, :])

    scores = jnp.einsum(
        "btnd,bsnd->bnts", q.astype(jnp.float32), key, precision=jax.lax.Precision.HIGHEST
    )
    scores = jnp.where(allowed[:, None], scores * scale, -jnp.inf)
    # A column of a dead row without context sees nothing: give it zeros, not 0 / 0.
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)
    output = jnp.einsum("bnts,bsnd->btnd", weights, value, precision=jax.lax.Precision.HIGHEST)
    return jnp.where(column_live[..., None, None], output, 0.0).astype(q.dtype)
