"""The compiled loops of a generation: chunked prefill, then rounds until every row is done."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.decoding import round as phases
from dflash_jax.decoding.distribution import Controls
from dflash_jax.decoding.spec import Spec, Weights
from dflash_jax.state.sequence import SequenceState
from dflash_jax.typing import Array, Int

PREFILL_CHUNK = 64

RUNNING, STOP, LENGTH = 0, 1, 2


class Progress(NamedTuple):
    """What the decode loop has published.

    tokens `[B, T]`, -1 where nothing is yet; emitted `[B]`; status `[B]` of RUNNING, STOP, LENGTH;
    verified, accepted, committed `[B, T]` per round (-1 for rounds a row sat out); rounds `[]`.
    """

    tokens: Int[Array, "B T"]
    emitted: Int[Array, "B"]
    status: Int[Array, "B"]
    verified: Int[Array, "B T"]
    accepted: Int[Array, "B T"]
    committed: Int[Array, "B T"]
    rounds: Int[Array, ""]


@partial(jax.jit, static_argnums=(0,), donate_argnums=(2,))
def prefill_prompts(
    spec: Spec,
    weights: Weights,
    state: SequenceState,
    prompts: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    controls: Controls,
) -> SequenceState:
    """Runs right-padded prompts chunk by chunk and chooses the anchors.

    `T` is a multiple of `PREFILL_CHUNK`; chunks past the longest prompt are not run.
    """

    def chunk(index, state):
        start = index * PREFILL_CHUNK
        tokens = jax.lax.dynamic_slice_in_dim(prompts, start, PREFILL_CHUNK, axis=1)
        count = jnp.clip(lengths - start, 0, PREFILL_CHUNK)
        return phases.prefill(spec, weights, state, tokens, count)

    chunks = -(-jnp.max(lengths) // PREFILL_CHUNK)
    state = jax.lax.fori_loop(0, chunks, chunk, state)
    return phases.select_anchor(spec, weights, state, controls)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3,))
def decode(
    spec: Spec,
    buffer: int,
    weights: Weights,
    state: SequenceState,
    controls: Controls,
    budget: Int[Array, "B"],
) -> tuple[SequenceState, Progress]:
    """Rounds until every row has stopped or used its budget.

    Args:
      buffer: columns of the output arrays, at least the largest budget.
      budget: tokens each row may publish, >= 1; the anchor in `state` is the first of them.
    """
    rows = budget.shape[0]
    blank = jnp.full((rows, buffer), -1, jnp.int32)

    def is_stop(tokens):
        return jnp.any(
            (tokens[..., None] == controls.stop_ids[:, None]) & (tokens >= 0)[..., None], axis=-1
        )

    def status_of(stopped, emitted):
        return jnp.where(stopped, STOP, jnp.where(emitted >= budget, LENGTH, RUNNING))

    emitted = jnp.ones(rows, jnp.int32)
    progress = Progress(
        tokens=blank.at[:, 0].set(state.anchor),
        emitted=emitted,
        status=status_of(is_stop(state.anchor[:, None])[:, 0], emitted),
        verified=blank,
        accepted=blank,
        committed=blank,
        rounds=jnp.int32(0),
    )

    def one_round(carry):
        state, progress = carry
        active = progress.status == RUNNING
        left = budget - progress.emitted
        planned = jnp.where(active, jnp.minimum(spec.draft_tokens, left - 1), 0)

        state = phases.catch_up(spec, weights, state)
        proposal = phases.propose(spec, weights, state, controls, planned)
        verified = phases.verify(spec, weights, state, proposal, active)
        accepted = phases.accept(spec, state, verified, proposal, controls)

        # Preview: cut after the first stop id; the budget holds already, since P < left.
        licensed = jnp.arange(spec.width) < accepted.licensed[:, None]
        stops = is_stop(accepted.tokens) & licensed
        stopped = jnp.any(stops, axis=1)
        count = jnp.where(stopped, jnp.argmax(stops, axis=1) + 1, accepted.licensed)
        count = jnp.where(active, count, 0)
        state = phases.commit(state, verified, accepted, count)

        column = jnp.arange(spec.width)
        target = jnp.where(column < count[:, None], progress.emitted[:, None] + column, buffer)
        row = jnp.arange(rows)[:, None]
        emitted = progress.emitted + count

        def log(array, values):
            return array.at[:, progress.rounds].set(jnp.where(active, values, -1), mode="drop")

        return state, Progress(
            tokens=progress.tokens.at[row, target].set(accepted.tokens, mode="drop"),
            emitted=emitted,
            status=jnp.where(active, status_of(stopped, emitted), progress.status),
            verified=log(progress.verified, planned),
            accepted=log(progress.accepted, accepted.accepted),
            committed=log(progress.committed, count),
            rounds=progress.rounds + 1,
        )

    def running(carry):
        return jnp.any(carry[1].status == RUNNING)

    return jax.lax.while_loop(running, one_round, (state, progress))
