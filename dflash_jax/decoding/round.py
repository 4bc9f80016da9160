"""The round: functions over state, in the order of the specification's flowchart.

    prefill* -> select_anchor -> ( catch_up -> propose -> verify -> accept -> commit )*

All are plain functions (jit them at the boundary); statics come first in a hashable `Spec`. Rows
are independent: a row that sits out a phase passes a count of zero and is left untouched.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.decoding import acceptance, randomness
from dflash_jax.decoding.acceptance import Accepted, Proposal
from dflash_jax.decoding.distribution import (
    Controls,
    best_token,
    process_logits,
    target_distribution,
)
from dflash_jax.decoding.propose import propose
from dflash_jax.decoding.randomness import Purpose
from dflash_jax.decoding.spec import Spec, Weights, apply_target
from dflash_jax.draft.context import materialize
from dflash_jax.precision import compute_dtype
from dflash_jax.state.counts import count_output, count_prompt
from dflash_jax.state.gdn import GDNRecords, fold
from dflash_jax.state.paged import append
from dflash_jax.state.sequence import SequenceState, TargetCache
from dflash_jax.typing import Array, Float, Int

__all__ = [
    "Verified",
    "accept",
    "anchor_logits",
    "catch_up",
    "commit",
    "prefill",
    "propose",
    "select_anchor",
    "verify",
]


class Verified(NamedTuple):
    """Outputs of the target over a block; round scratch, nothing of it is committed.

    Columns from the row's live width on mean nothing. key and value are this block's, for the
    full-attention layers; taps become pending features.
    """

    logits: Float[Array, "B W V"]
    hidden: Float[Array, "B W H"]
    taps: Float[Array, "B W F"]
    key: Float[Array, "L B W K D"]
    value: Float[Array, "L B W K D"]
    records: GDNRecords


def prefill(
    spec: Spec,
    weights: Weights,
    state: SequenceState,
    tokens: Int[Array, "B T"],
    count: Int[Array, "B"],
) -> SequenceState:
    """Processes the first `count[b]` tokens of a chunk; their features go to the draft context.

    The anchor is not chosen here: after a prompt's last chunk call `select_anchor`.
    """
    kv, frontier = state.target.kv, state.frontier
    block = apply_target(
        spec, weights, tokens, frontier, count, state.target, tap_ids=spec.taps, record=False
    )
    last = jnp.maximum(count - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(block.hidden, last, axis=1)[:, 0]
    # The store depends on the attention's outcome, or else XLA copies the whole pool so that it
    # can write to one while loops still read the other. No hidden column is minus infinity.
    stored = jnp.where(hidden[:, 0] == -jnp.inf, 0, count)
    draft = state.draft
    if spec.draft is not None:
        draft = materialize(
            spec.draft,
            weights.draft_context,
            draft,
            block.taps,
            frontier,
            count,
            compute_dtype(spec.dtype),
        )
    return state._replace(
        frontier=frontier + count,
        context_frontier=frontier + count,
        hidden=jnp.where(count[:, None] > 0, hidden, state.hidden),
        target=TargetCache(append(kv, block.key, block.value, frontier, stored), block.gdn),
        draft=draft,
        counts=count_prompt(state.counts, tokens, count),
    )


def anchor_logits(
    spec: Spec, weights: Weights, state: SequenceState, controls: Controls
) -> Float[Array, "B 1 V"]:
    """Processed logits of x_F after a prompt's last chunk."""
    logits = apply_target(spec, weights, state.hidden[:, None], method="logits")
    nothing = jnp.zeros((logits.shape[0], 0), jnp.int32)
    return process_logits(
        logits, controls, state.counts, nothing, state.frontier, spec.public_vocab
    )


def select_anchor(
    spec: Spec, weights: Weights, state: SequenceState, controls: Controls
) -> SequenceState:
    """Chooses x_F from the target's law after the prompt; it counts as published."""
    processed = anchor_logits(spec, weights, state, controls)

    def sampled():
        law = target_distribution(processed, controls)[:, 0]
        purpose = jnp.full(law.shape[0], Purpose.TARGET)
        return randomness.draw_tokens(law, state.seed, state.frontier, purpose)

    anchor = jax.lax.cond(
        jnp.any(controls.temperature > 0), sampled, lambda: best_token(processed[:, 0])
    )
    counts = count_output(state.counts, anchor[:, None], jnp.ones_like(anchor))
    return state._replace(anchor=anchor, counts=counts)


def catch_up(
    spec: Spec, weights: Weights, state: SequenceState, active: Array | None = None
) -> SequenceState:
    """Moves pending features into the draft context: F_ctx = F afterwards.

    Args:
      active: rows that take part (all by default); the others stay as they are.
    """
    start, frontier = state.context_frontier, state.frontier
    if active is not None:
        frontier = jnp.where(active, frontier, start)
    if spec.draft is None:
        return state._replace(context_frontier=frontier)
    draft = materialize(
        spec.draft,
        weights.draft_context,
        state.draft,
        state.pending,
        start,
        frontier - start,
        compute_dtype(spec.dtype),
    )
    return state._replace(draft=draft, context_frontier=frontier)


def verify(
    spec: Spec,
    weights: Weights,
    state: SequenceState,
    proposal: Proposal,
    active: Array | None = None,
) -> Verified:
    """The target, causally, over anchor and proposals; nothing persistent is written.

    Args:
      active: rows that take part (all by default); the others have no live column.
    """
    tokens = jnp.concatenate([state.anchor[:, None], proposal.tokens], axis=1)
    live = proposal.count + 1
    if active is not None:
        live = jnp.where(active, live, 0)
    block = apply_target(
        spec,
        weights,
        tokens,
        state.frontier,
        live,
        state.target,
        tap_ids=spec.taps,
        record=True,
    )
    logits = apply_target(spec, weights, block.hidden, method="logits")
    return Verified(logits, block.hidden, block.taps, block.key, block.value, block.gdn)


def accept(
    spec: Spec, state: SequenceState, verified: Verified, proposal: Proposal, controls: Controls
) -> Accepted:
    """Licensed tokens of each row; see `acceptance.accept`."""
    return acceptance.accept(
        verified.logits,
        proposal,
        controls,
        state.counts,
        state.seed,
        state.frontier,
        spec.public_vocab,
    )


def commit(
    state: SequenceState, verified: Verified, accepted: Accepted, count: Int[Array, "B"]
) -> SequenceState:
    """Commits the first `count[b]` input columns and licenses as many tokens for publication.

    KV, Fold, frontier, anchor, continuation hidden, pending features and token counts advance
    together.

    Args:
      count: N of each row, 0..L; 0 leaves the row as it is.
    """
    kept = count > 0
    last = jnp.maximum(count - 1, 0)[:, None]
    anchor = jnp.take_along_axis(accepted.tokens, last, axis=1)[:, 0]
    hidden = jnp.take_along_axis(verified.hidden, last[..., None], axis=1)[:, 0]
    kv = append(state.target.kv, verified.key, verified.value, state.frontier, count)
    pending = state.pending
    if pending is not None:
        pending = jnp.where(kept[:, None, None], verified.taps, pending)
    return state._replace(
        frontier=state.frontier + count,
        anchor=jnp.where(kept, anchor, state.anchor),
        hidden=jnp.where(kept[:, None], hidden, state.hidden),
        target=TargetCache(kv, fold(state.target.gdn, verified.records, count)),
        pending=pending,
        counts=count_output(state.counts, accepted.tokens, count),
    )
