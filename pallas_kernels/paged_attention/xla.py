"""XLA forms: one gather and one softmax for a short table, a loop over chunks for a long one."""

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_attention import MASKED, grouped_attention

# Positions per loop step. A table of at most this many takes the form without a loop: fewer
# operations, but its cost grows with the table and not with what the rows have filled.
CHUNK = 256


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
    """See `api.paged_attention`."""
    rows, tokens = q.shape[:2]
    page = key_pages.shape[2]
    column = jnp.arange(tokens)
    block_live = column < live[:, None]
    block_mask = jnp.broadcast_to(block_live[:, None, :], (rows, tokens, tokens))
    if ancestors is not None:
        block_mask = block_mask & ((ancestors[:, :, None] >> column) & 1 == 1)
    elif causal:
        block_mask = block_mask & (column[:, None] >= column)

    if block_table.shape[1] * page <= CHUNK:
        context_live = jnp.arange(block_table.shape[1] * page) < lengths[:, None]
        return grouped_attention(
            q,
            _read(key_pages, layer, block_table),
            _read(value_pages, layer, block_table),
            block_key,
            block_value,
            context_live=context_live,
            context_mask=context_live[:, None, :],
            block_live=block_live,
            block_mask=block_mask,
            scale=scale,
        )
    pages = (key_pages, value_pages)
    return _chunked(
        q, block_key, block_value, pages, block_table, lengths, block_live, block_mask, layer, scale
    )


def _read(pages, layer, table):
    # One gather with (layer, page) indices: `pages[layer]` first could copy the pool. An unused
    # entry is clipped to some page; what it reads is masked by the row's length.
    read = pages.at[layer, table].get(mode="clip", wrap_negative_indices=False)
    return read.reshape(read.shape[0], -1, *read.shape[3:]).astype(jnp.float32)


def _chunked(
    q, block_key, block_value, pages, block_table, lengths, block_live, block_mask, layer, scale
):
    """Online softmax over chunks of pages, as many as the longest row needs.

    A chunk beyond a row's length changes nothing in that row, to the bit: its maximum stays,
    the factor is exp(0) = 1 and the sums grow by 0. So a row does not depend on its neighbours.
    """
    rows, tokens, heads, dim = q.shape
    kv_heads, page = block_key.shape[2], pages[0].shape[2]
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    grouped = (q.astype(jnp.float32) * scale).reshape(rows, tokens, kv_heads, -1, dim)

    def attend(state, key, value, live, mask):
        top, total, mixed = state
        key = jnp.where(live[:, :, None, None], key, 0.0)
        value = jnp.where(live[:, :, None, None], value, 0.0)
        scores = jnp.einsum("btkgd,bskd->bkgts", grouped, key, precision=precision)
        scores = jnp.where(mask[:, None, None], scores, MASKED)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_top[..., None])
        rescale = jnp.exp(top - new_top)
        return (
            new_top,
            total * rescale + jnp.sum(weights, axis=-1),
            mixed * rescale[..., None]
            + jnp.einsum("bkgts,bskd->bkgtd", weights, value, precision=precision),
        )

    per_chunk = max(1, CHUNK // page)
    span = per_chunk * page
    padding = -block_table.shape[1] % per_chunk
    table = jnp.pad(block_table, ((0, 0), (0, padding)))

    def step(index, state):
        used = jax.lax.dynamic_slice_in_dim(table, index * per_chunk, per_chunk, axis=1)
        live = index * span + jnp.arange(span) < lengths[:, None]
        key, value = (_read(pool, layer, used) for pool in pages)
        return attend(state, key, value, live, live[:, None, :])

    # The block first: a live column sees itself, so that its maximum is a real score from here
    # on and masked scores weigh exactly nothing.
    shape = (rows, kv_heads, heads // kv_heads, tokens)
    state = (jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, dim)))
    block = (block_key.astype(jnp.float32), block_value.astype(jnp.float32))
    state = attend(state, *block, block_live, block_mask)
    chunks = (jnp.max(lengths) + span - 1) // span
    _, total, mixed = jax.lax.fori_loop(0, chunks, step, state)

    output = jnp.transpose(mixed / total[..., None], (0, 3, 1, 2, 4))
    output = jnp.where(block_live[:, :, None, None, None], output, 0.0)
    return output.reshape(q.shape).astype(q.dtype)
