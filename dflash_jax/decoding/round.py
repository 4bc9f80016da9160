"""The round: functions over state, in the order of the specification's flowchart.

    prefill* -> select_anchor -> ( catch_up -> propose -> verify -> accept -> commit )*

All are plain functions (jit them at the boundary); statics come first in a hashable `Spec`. Rows
are independent: a row that sits out a phase passes a count of zero and is left untouched.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.decoding import acceptance, randomness
from dflash_jax.decoding.acceptance import Accepted, Proposal, point_mass
from dflash_jax.decoding.distribution import (
    Controls,
    best_token,
    process_logits,
    target_distribution,
)
from dflash_jax.decoding.randomness import Purpose
from dflash_jax.draft.context import attend_context, materialize
from dflash_jax.draft.model import DraftModel
from dflash_jax.draft.proposal_head import proposal_scores
from dflash_jax.precision import compute_dtype
from dflash_jax.state.counts import count_output, count_prompt
from dflash_jax.state.gdn import GDNRecords, fold
from dflash_jax.state.paged import append
from dflash_jax.state.sequence import SequenceState, TargetCache
from dflash_jax.target.model import TargetModel
from dflash_jax.typing import Array, Float, Int, Params
from pallas_kernels.candidate_selector import candidate_selector
from pallas_kernels.elementary import stable_top_k

MAX_DRAFT_TOKENS = 15


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a compiled round depends on besides array shapes.

    draft: None is plain decoding, and then draft_tokens is 0.
    draft_tokens: K, proposals of a block; the block is W = K + 1 columns wide.
    public_vocab: token ids from here on are padding of embedding and head.
    dtype: name of the compute dtype.
    """

    target: TargetConfig
    draft: DraftConfig | None
    draft_tokens: int
    public_vocab: int
    dtype: str = "float32"

    def __post_init__(self):
        if self.draft is None and self.draft_tokens:
            raise ValueError(f"draft_tokens: got {self.draft_tokens} without a draft, expected 0")
        if self.draft is not None and not 1 <= self.draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(
                f"draft_tokens: got {self.draft_tokens}, expected 1..{MAX_DRAFT_TOKENS} "
                "(0 is plain decoding)"
            )

    @property
    def width(self) -> int:
        return self.draft_tokens + 1

    @property
    def taps(self) -> tuple[int, ...]:
        return self.draft.target_layer_ids if self.draft else ()


class Weights(NamedTuple):
    """Parameter trees of the pair; draft is None for plain decoding."""

    target: Params
    draft: Params | None


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


def _target(spec: Spec, weights: Weights, *args, **kwargs):
    model = TargetModel(spec.target, compute_dtype(spec.dtype))
    return model.apply({"params": weights.target}, *args, **kwargs)


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
    block = _target(
        spec, weights, tokens, frontier, count, state.target, tap_ids=spec.taps, record=False
    )
    last = jnp.maximum(count - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(block.hidden, last, axis=1)[:, 0]
    draft = state.draft
    if spec.draft is not None:
        draft = materialize(
            spec.draft, weights.draft, draft, block.taps, frontier, count, compute_dtype(spec.dtype)
        )
    return state._replace(
        frontier=frontier + count,
        context_frontier=frontier + count,
        hidden=jnp.where(count[:, None] > 0, hidden, state.hidden),
        target=TargetCache(append(kv, block.key, block.value, frontier, count), block.gdn),
        draft=draft,
        counts=count_prompt(state.counts, tokens, count),
    )


def select_anchor(
    spec: Spec,
    weights: Weights,
    state: SequenceState,
    controls: Controls,
    active: Array | None = None,
) -> SequenceState:
    """Chooses x_F from the target's law after the prompt; it counts as published.

    Args:
      active: rows that take part (all by default); the others keep their anchor.
    """
    logits = _target(spec, weights, state.hidden[:, None], method="logits")
    nothing = jnp.zeros((logits.shape[0], 0), jnp.int32)
    processed = process_logits(
        logits, controls, state.counts, nothing, state.frontier, spec.public_vocab
    )

    def sampled():
        law = target_distribution(processed, controls)[:, 0]
        purpose = jnp.full(law.shape[0], Purpose.TARGET)
        return randomness.draw_tokens(law, state.seed, state.frontier, purpose)

    anchor = jax.lax.cond(
        jnp.any(controls.temperature > 0), sampled, lambda: best_token(processed[:, 0])
    )
    live = jnp.ones_like(anchor) if active is None else active.astype(jnp.int32)
    return state._replace(
        anchor=jnp.where(live > 0, anchor, state.anchor),
        counts=count_output(state.counts, anchor[:, None], live),
    )


def catch_up(spec: Spec, weights: Weights, state: SequenceState) -> SequenceState:
    """Moves pending features into the draft context: F_ctx = F afterwards."""
    if spec.draft is None:
        return state._replace(context_frontier=state.frontier)
    start = state.context_frontier
    draft = materialize(
        spec.draft,
        weights.draft,
        state.draft,
        state.pending,
        start,
        state.frontier - start,
        compute_dtype(spec.dtype),
    )
    return state._replace(draft=draft, context_frontier=state.frontier)


def propose(
    spec: Spec,
    weights: Weights,
    state: SequenceState,
    controls: Controls,
    count: Int[Array, "B"],
) -> Proposal:
    """One masked block after `catch_up`: argmax (DFlash) or conditional walk (DFlash2).

    Args:
      count: P of each row, 0..K. DFlash runs P + 1 live columns, DFlash2 all W.
    """
    rows = count.shape[0]
    if spec.draft is None:
        return point_mass(jnp.zeros((rows, 0), jnp.int32), count)
    config = spec.draft
    masks = jnp.full((rows, spec.draft_tokens), config.mask_token_id, jnp.int32)
    block = jnp.concatenate([state.anchor[:, None], masks], axis=1)
    positions = state.frontier[:, None] + jnp.arange(spec.width)
    live = jnp.full_like(count, spec.width) if config.dflash2 else count + 1

    model = DraftModel(config, compute_dtype(spec.dtype))
    hidden = model.apply(
        {"params": weights.draft},
        _target(spec, weights, block, method="embed"),
        positions,
        attend_context(config, state.draft, state.frontier, live),
    )[:, 1:]
    scores = proposal_scores(
        config, _target(spec, weights, hidden, method="logits"), spec.public_vocab
    )
    if not config.dflash2:
        return point_mass(jnp.argmax(scores, axis=-1).astype(jnp.int32), count)
    unary, candidates = stable_top_k(scores, config.selector_top_k)
    projected, predecessor, successor = model.apply(
        {"params": weights.draft}, hidden, method="select"
    )
    uniforms = jax.lax.cond(
        jnp.any(controls.temperature > 0),
        lambda: randomness.uniforms(
            state.seed, state.frontier + 1, spec.draft_tokens, Purpose.PROPOSAL
        ),
        lambda: jnp.zeros((rows, spec.draft_tokens)),
    )
    tokens, _, q = candidate_selector(
        unary,
        candidates,
        projected,
        predecessor,
        successor,
        state.anchor,
        controls.temperature,
        uniforms,
    )
    return Proposal(tokens, candidates, q, count)


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
    block = _target(
        spec,
        weights,
        tokens,
        state.frontier,
        live,
        state.target,
        tap_ids=spec.taps,
        record=True,
    )
    logits = _target(spec, weights, block.hidden, method="logits")
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
