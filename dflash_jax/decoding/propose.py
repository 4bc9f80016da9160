"""The draft's part of a round: one masked block, then tokens and the law they came from."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.decoding import randomness
from dflash_jax.decoding.acceptance import Proposal, point_mass
from dflash_jax.decoding.distribution import Controls
from dflash_jax.decoding.randomness import Purpose
from dflash_jax.decoding.spec import Spec, Weights, apply_target
from dflash_jax.draft.context import attend_context
from dflash_jax.draft.model import DraftModel
from dflash_jax.draft.proposal_head import head_scores, proposal_scores, to_token_ids
from dflash_jax.precision import compute_dtype
from dflash_jax.state.sequence import SequenceState
from dflash_jax.typing import Array, Float, Int
from pallas_kernels.candidate_selector import candidate_selector
from pallas_kernels.elementary import stable_top_k


class Lattice(NamedTuple):
    """DFlash2's shortlists and what their energies are made of, before any choice.

    scores, candidates: by rank, candidates as token ids; projected: hidden columns through the
    hidden projection; predecessor, successor: codebooks.
    """

    scores: Float[Array, "B K C"]
    candidates: Int[Array, "B K C"]
    projected: Float[Array, "B K R"]
    predecessor: Float[Array, "V R"]
    successor: Float[Array, "V R"]


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
    if not spec.draft.dflash2:
        _, scores = _block(spec, weights, state, count + 1)
        best = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        return point_mass(to_token_ids(weights.proposal_head, best), count)
    uniforms = jax.lax.cond(
        jnp.any(controls.temperature > 0),
        lambda: randomness.uniforms(
            state.seed, state.frontier + 1, spec.draft_tokens, Purpose.PROPOSAL
        ),
        lambda: jnp.zeros((rows, spec.draft_tokens)),
    )
    lattice = make_lattice(spec, weights, state)
    return walk(lattice, state.anchor, controls.temperature, uniforms, count)


def make_lattice(spec: Spec, weights: Weights, state: SequenceState) -> Lattice:
    """DFlash2's block over all W columns, its shortlists and projections."""
    hidden, scores = _block(spec, weights, state, jnp.full_like(state.frontier, spec.width))
    unary, ranked = stable_top_k(scores, spec.draft.selector_top_k)
    model = DraftModel(spec.draft, compute_dtype(spec.dtype))
    projected = model.apply({"params": weights.draft}, hidden, method="select")
    return Lattice(unary, to_token_ids(weights.proposal_head, ranked), *projected)


def walk(
    lattice: Lattice,
    anchor: Int[Array, "B"],
    temperature: Float[Array, "B"],
    uniforms: Float[Array, "B K"],
    count: Int[Array, "B"],
) -> Proposal:
    """The conditional walk through the lattice; q is the law that each token was drawn from."""
    tokens, _, q = candidate_selector(*lattice, anchor, temperature, uniforms)
    return Proposal(tokens, lattice.candidates, q, count)


def _block(spec, weights, state, live):
    """Hidden mask columns of the block and their scores over the proposal head's rows."""
    config = spec.draft
    masks = jnp.full((live.shape[0], spec.draft_tokens), config.mask_token_id, jnp.int32)
    block = jnp.concatenate([state.anchor[:, None], masks], axis=1)
    hidden = DraftModel(config, compute_dtype(spec.dtype)).apply(
        {"params": weights.draft},
        apply_target(spec, weights, block, method="embed"),
        state.frontier[:, None] + jnp.arange(spec.width),
        attend_context(config, state.draft, state.frontier, live),
    )[:, 1:]
    head = weights.proposal_head
    if head is None:
        scores = apply_target(spec, weights, hidden, method="logits")
    else:
        scores = head_scores(head, hidden)
    return hidden, proposal_scores(config, scores, spec.public_vocab, head)
