"""From draft hidden columns to scores over tokens: the target's whole head, or rows of it.

An indexed head holds the rows of tokens worth proposing and the map from its rows to token ids.
It changes what is proposed, never what is emitted.
"""

from typing import NamedTuple

import jax.numpy as jnp

from dflash_jax.config import DraftConfig
from dflash_jax.layers import contract
from dflash_jax.typing import Array, Float, Int


class ProposalHead(NamedTuple):
    """Rows of the target's head; `token_ids` ascend, so that the lowest row is the lowest id."""

    weight: Float[Array, "M H"]
    token_ids: Int[Array, "M"]


def take_rows(head: Float[Array, "V H"], token_ids: Int[Array, "M"]) -> ProposalHead:
    """The indexed head of these tokens (distinct, ascending)."""
    return ProposalHead(jnp.take(head, token_ids, axis=0), jnp.asarray(token_ids, jnp.int32))


def head_scores(head: ProposalHead, hidden: Float[Array, "... H"]) -> Float[Array, "... M"]:
    """Float32 products with the head's rows, as the whole head would give them."""
    return contract(hidden, head.weight, jnp.float32)


def to_token_ids(head: ProposalHead | None, rows: Int[Array, "..."]) -> Int[Array, "..."]:
    """Token ids of head rows; the rows themselves for the whole head."""
    return rows if head is None else jnp.take(head.token_ids, rows)


def proposal_scores(
    config: DraftConfig,
    scores: Float[Array, "... M"],
    public_vocab: int,
    head: ProposalHead | None = None,
) -> Float[Array, "... M"]:
    """Scales, soft-caps and masks a head's scores of draft hidden columns.

    Tokens from `public_vocab` on are padding of the head and never proposed. No other control of
    the target's sampling acts here (specification, candidate selector).

    Args:
      head: the indexed head that the scores are over; None is the whole head, row = token.
    """
    scores = scores.astype(jnp.float32) * config.output_multiplier
    if config.final_logit_softcapping:
        scores = jnp.tanh(scores / config.final_logit_softcapping)
        scores = scores * config.final_logit_softcapping
    public = to_token_ids(head, jnp.arange(scores.shape[-1])) < public_vocab
    return jnp.where(public, scores, -jnp.inf)
