"""The masked softmax over [context | block] that the XLA forms of both attention ops share."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# Finite, so that a query that sees nothing (a dead column) gives a uniform row and no NaN, in
# the gradient too; far below any score, so that exp() of a masked score is exactly zero.
MASKED = -1e30


def grouped_attention(
    q: Float[Array, "B T N D"],
    context_key: Float[Array, "B S K D"],
    context_value: Float[Array, "B S K D"],
    block_key: Float[Array, "B T K D"],
    block_value: Float[Array, "B T K D"],
    *,
    context_live: Bool[Array, "B S"],
    context_mask: Bool[Array, "B #T S"],
    block_live: Bool[Array, "B T"],
    block_mask: Bool[Array, "B T T"],
    scale: float,
) -> Float[Array, "B T N D"]:
    """One softmax over context and block keys; query head h reads key head h // (N / K).

    Args:
      q: queries.
      context_key: context keys in storage order, dead slots included.
      context_value: likewise.
      block_key: fresh keys.
      block_value: fresh values.
      context_live: slots that hold something; others may hold NaN.
      context_mask: what each query may see; implies `context_live`.
      block_live: live columns; others may hold NaN, and their outputs are zero.
      block_mask: what each query may see of the block; implies `block_live` of the key.
      scale: factor on the scores.

    Returns:
      Attention output in `q.dtype`; scores, softmax and sums in float32.
    """
    rows, columns, heads, dim = q.shape
    kv_heads = block_key.shape[2]
    # Full float32 only where the caller works in float32: with TF32 or bfloat16 passes the
    # greedy text of a float32 model would not be reproducible.
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    live = jnp.concatenate([context_live, block_live], axis=1)
    context_mask = jnp.broadcast_to(context_mask, (rows, columns, context_live.shape[1]))
    mask = jnp.concatenate([context_mask, block_mask], axis=2)

    def joined(context, block):
        # The masked copy costs no pass of its own: a product wants the heads in front, so that
        # XLA copies its operands anyway and fuses all this into that copy. A probability of
        # zero does not silence NaN (0 * NaN = NaN): the operand must be clean. Keys too, for
        # the gradient.
        both = [context.astype(jnp.float32), block.astype(jnp.float32)]
        return jnp.where(live[:, :, None, None], jnp.concatenate(both, axis=1), 0.0)

    key, value = joined(context_key, block_key), joined(context_value, block_value)
    grouped = (q.astype(jnp.float32) * scale).reshape(
        rows, columns, kv_heads, heads // kv_heads, dim
    )
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, key, precision=precision)
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    total = jnp.sum(weights, axis=-1)
    output = jnp.einsum("bkgts,bskd->btkgd", weights, value, precision=precision)
    output = output / jnp.transpose(total, (0, 3, 1, 2))[..., None]
    output = jnp.where(block_live[:, :, None, None, None], output, 0.0)
    return output.reshape(q.shape).astype(q.dtype)
