"""Which tokens a sequence has had: what the penalties of the target distribution count."""

from typing import NamedTuple

import jax.numpy as jnp

from dflash_jax.typing import Array, Bool, Int


class TokenCounts(NamedTuple):
    """Per row, over the target's vocabulary.

    prompt: the token occurs in the prompt.
    output: how often it was published; the anchor is published, proposals are not.
    """

    prompt: Bool[Array, "B V"]
    output: Int[Array, "B V"]


def init_counts(rows: int, vocab_size: int) -> TokenCounts:
    shape = (rows, vocab_size)
    return TokenCounts(jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32))


def count_prompt(
    counts: TokenCounts, tokens: Int[Array, "B T"], live: Int[Array, "B"]
) -> TokenCounts:
    """Notes the first `live[b]` tokens of a prompt chunk."""
    row, token = _live_tokens(counts, tokens, live)
    return counts._replace(prompt=counts.prompt.at[row, token].set(True, mode="drop"))


def count_output(
    counts: TokenCounts, tokens: Int[Array, "B N"], live: Int[Array, "B"]
) -> TokenCounts:
    """Counts the first `live[b]` tokens as published."""
    row, token = _live_tokens(counts, tokens, live)
    return counts._replace(output=counts.output.at[row, token].add(1, mode="drop"))


def _live_tokens(counts, tokens, live):
    """Row and column indices; those of dead tokens lie outside and are dropped."""
    vocab_size = counts.prompt.shape[1]
    column = jnp.arange(tokens.shape[1])
    # A negative id would wrap around to the end of the vocabulary.
    valid = (column < live[:, None]) & (tokens >= 0)
    return jnp.arange(tokens.shape[0])[:, None], jnp.where(valid, tokens, vocab_size)
