"""From draft hidden columns to scores over the target's vocabulary."""

import jax.numpy as jnp

from dflash_jax.config import DraftConfig
from dflash_jax.typing import Array, Float


def proposal_scores(
    config: DraftConfig, head_scores: Float[Array, "... V"], public_vocab: int
) -> Float[Array, "... V"]:
    """Scales, soft-caps and masks the target head's scores of draft hidden columns.

    Rows from `public_vocab` on are padding of the head and never proposed. No other control of
    the target's sampling acts here (specification, candidate selector).
    """
    scores = head_scores.astype(jnp.float32) * config.output_multiplier
    if config.final_logit_softcapping:
        scores = jnp.tanh(scores / config.final_logit_softcapping)
        scores = scores * config.final_logit_softcapping
    public = jnp.arange(scores.shape[-1]) < public_vocab
    return jnp.where(public, scores, -jnp.inf)
