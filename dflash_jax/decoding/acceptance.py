"""Which proposals the target licenses, and the token that follows them.

Speculative sampling (Leviathan et al., 2023; Chen et al., 2023) with the proposal law that the
tokens were really drawn from: a point mass for DFlash, the retained q for DFlash2.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.decoding import randomness
from dflash_jax.decoding.distribution import (
    Controls,
    best_token,
    process_logits,
    target_distribution,
)
from dflash_jax.decoding.randomness import Purpose
from dflash_jax.state.counts import TokenCounts
from dflash_jax.typing import Array, Float, Int, UInt32


class Proposal(NamedTuple):
    """Proposed tokens and the law they came from.

    tokens: d_1..d_K.
    candidates, q: the law of each column: mass `q[b, i, c]` on token `candidates[b, i, c]`, ids
      of a column distinct. C = 1 with mass one for a point mass.
    count: P, how many of the K are verified; later columns mean nothing.
    """

    tokens: Int[Array, "B K"]
    candidates: Int[Array, "B K C"]
    q: Float[Array, "B K C"]
    count: Int[Array, "B"]


class Accepted(NamedTuple):
    """tokens: licensed y in the first `accepted + 1` columns, -1 after; accepted: A."""

    tokens: Int[Array, "B W"]
    accepted: Int[Array, "B"]

    @property
    def licensed(self) -> Int[Array, "B"]:
        """L = A + 1."""
        return self.accepted + 1


def point_mass(tokens: Int[Array, "B K"], count: Int[Array, "B"]) -> Proposal:
    """A proposal whose law is the tokens themselves."""
    return Proposal(tokens, tokens[..., None], jnp.ones((*tokens.shape, 1)), count)


def accept(
    logits: Float[Array, "B W V"],
    proposal: Proposal,
    controls: Controls,
    counts: TokenCounts,
    seed: UInt32[Array, "B"],
    frontier: Int[Array, "B"],
    public_vocab: int,
) -> Accepted:
    """Accepts a prefix of the proposals and adds the target's own token.

    Args:
      logits: float32 target scores; column i is the law of position `frontier + i + 1`.
      proposal: what was verified; column i is checked against logits column i.
      counts: tokens of the prompt and those published, the anchor included.
      frontier: F of each row: absolute positions name the random draws.
      public_vocab: ids from here on are padding of the head.
    """
    processed = process_logits(
        logits, controls, counts, proposal.tokens, frontier + 1, public_vocab
    )
    # Probabilities over the vocabulary are needed only where some row is sampled.
    accepted, extra = jax.lax.cond(
        jnp.any(controls.temperature > 0),
        lambda: _sampled(processed, proposal, controls, seed, frontier),
        lambda: _greedy(processed, proposal),
    )
    return Accepted(_licensed(proposal.tokens, accepted, extra), accepted)


def _prefix_length(passed: Array, count: Array) -> Array:
    """Length of the leading run of True within the first `count[b]` columns."""
    live = jnp.arange(passed.shape[1]) < count[:, None]
    return jnp.sum(jnp.cumprod((passed & live).astype(jnp.int32), axis=1), axis=1)


def _greedy(processed, proposal):
    best = best_token(processed)
    accepted = _prefix_length(proposal.tokens == best[:, :-1], proposal.count)
    return accepted, jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0]


def _sampled(processed, proposal, controls, seed, frontier):
    law = target_distribution(processed, controls)
    columns = proposal.tokens.shape[1]
    uniforms = randomness.uniforms(seed, frontier + 1, columns, Purpose.ACCEPT)
    accepted = accepted_prefix(law, proposal, uniforms)
    purpose = jnp.where(accepted < proposal.count, Purpose.CORRECTION, Purpose.BONUS)
    purpose = jnp.where(proposal.count == 0, Purpose.TARGET, purpose)
    extra = extra_law(law, proposal, accepted)
    return accepted, randomness.draw_tokens(extra, seed, frontier + accepted + 1, purpose)


def accepted_prefix(
    law: Float[Array, "B W V"], proposal: Proposal, uniforms: Float[Array, "B K"]
) -> Int[Array, "B"]:
    """A: length of the leading run of verified proposals with `u < p / q`.

    Args:
      law: target probabilities; column i checks proposal i.
      uniforms: in [0, 1), one per proposal.
    """
    mass = jnp.take_along_axis(law[:, :-1], proposal.tokens[..., None], axis=2)[..., 0]
    chosen = proposal.candidates == proposal.tokens[..., None]
    proposed_mass = jnp.sum(jnp.where(chosen, proposal.q, 0.0), axis=-1)
    # u < p / q without the division; a token outside the target's support never passes.
    return _prefix_length(uniforms * proposed_mass < mass, proposal.count)


def extra_law(
    law: Float[Array, "B W V"], proposal: Proposal, accepted: Int[Array, "B"]
) -> Float[Array, "B V"]:
    """Law of the token after the accepted ones: the residual where a proposal was rejected."""
    here = jnp.take_along_axis(law, accepted[:, None, None], axis=1)[:, 0]
    columns = proposal.tokens.shape[1]
    if not columns:
        return here
    index = jnp.minimum(accepted, columns - 1)[:, None, None]
    candidates = jnp.take_along_axis(proposal.candidates, index, axis=1)[:, 0]
    q = jnp.take_along_axis(proposal.q, index, axis=1)[:, 0]
    rejected = accepted < proposal.count
    return jnp.where(rejected[:, None], residual(here, candidates, q), here)


def residual(
    law: Float[Array, "B V"], candidates: Int[Array, "B C"], q: Float[Array, "B C"]
) -> Float[Array, "B V"]:
    """`max(p - q, 0)`, normalised; p itself where nothing is left."""
    rows = jnp.arange(law.shape[0])[:, None]
    left = jnp.maximum(law.at[rows, candidates].add(-q, mode="drop"), 0.0)
    total = jnp.sum(left, axis=-1, keepdims=True)
    return jnp.where(total > 0, left / jnp.where(total > 0, total, 1.0), law)


def _licensed(tokens, accepted, extra):
    """[d_1..d_A, extra, -1, ...]."""
    column = jnp.arange(tokens.shape[1] + 1)
    padded = jnp.pad(tokens, ((0, 0), (0, 1)))
    licensed = jnp.where(column < accepted[:, None], padded, -1)
    return jnp.where(column == accepted[:, None], extra[:, None], licensed)
