"""The engine's compiled programs: five for a width and a number of rows, made before any request.

    admit                     a row is emptied and gets its seed and controls
    prefill, choose_anchor    one row, one chunk of its prompt; after the last, its first token
    speculate                 all decoding rows: catch_up, propose, verify, accept
    commit                    all rows, the first N[b] columns

Between `speculate` and `commit` the licensed tokens go to the host, which chooses N.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decoding import round as phases
from dflash_jax.decoding.acceptance import Accepted
from dflash_jax.decoding.distribution import Controls
from dflash_jax.decoding.round import Verified
from dflash_jax.decoding.spec import Spec, Weights
from dflash_jax.sessions import rows
from dflash_jax.state.sequence import SequenceState
from dflash_jax.typing import Array, Int, UInt32

Report = Callable[[str, float, int, int], None]
"""`report(program, seconds, done, total)` after each compilation."""


class Speculated(NamedTuple):
    """What a round holds until it is committed, and its one egress.

    egress: licensed tokens `[:, :W]` (-1 after the last) and accepted counts `[:, W]`.
    """

    verified: Verified
    accepted: Accepted
    egress: Int[Array, "B W1"]


@partial(jax.jit, donate_argnums=(0, 1))
def admit(
    state: SequenceState,
    controls: Controls,
    row: Int[Array, ""],
    seed: UInt32[Array, ""],
    own: Controls,
) -> tuple[SequenceState, Controls]:
    """Empties a row and sets the seed and controls of the request that moves in."""
    return rows.empty(state, row, seed), rows.put_controls(controls, row, own)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def prefill(
    spec: Spec,
    weights: Weights,
    state: SequenceState,
    row: Int[Array, ""],
    tokens: Int[Array, "1 T"],
    count: Int[Array, "1"],
) -> SequenceState:
    """Processes the first `count` tokens of a chunk of one row's prompt."""
    one = rows.take(state, row)
    done = phases.prefill(spec, weights, one._replace(pending=None), tokens, count)
    return rows.put(state, row, done._replace(pending=one.pending))


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def choose_anchor(
    spec: Spec,
    weights: Weights,
    state: SequenceState,
    controls: Controls,
    row: Int[Array, ""],
) -> tuple[SequenceState, Int[Array, "1"]]:
    """Chooses one row's first token after its prompt; also returns it for the host."""
    one = rows.take(state, row)
    done = phases.select_anchor(spec, weights, one, rows.take_controls(controls, row))
    return rows.put(state, row, done), done.anchor


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def speculate(
    spec: Spec,
    weights: Weights,
    state: SequenceState,
    controls: Controls,
    planned: Int[Array, "B"],
) -> tuple[SequenceState, Speculated]:
    """One round up to the decision what to commit; of the state only the draft context moves on.

    Args:
      planned: P of each row, 0..K; -1 for rows that sit out, which license nothing of meaning.
    """
    active = planned >= 0
    state = phases.catch_up(spec, weights, state)
    # A row that sits out must not cost the others anything: no context to attend to, no filter.
    view = state._replace(frontier=jnp.where(active, state.frontier, 0))
    controls = _without(controls, ~active)
    proposal = phases.propose(spec, weights, view, controls, jnp.maximum(planned, 0))
    verified = phases.verify(spec, weights, view, proposal, active)
    accepted = phases.accept(spec, view, verified, proposal, controls)
    egress = jnp.concatenate([accepted.tokens, accepted.accepted[:, None]], axis=1)
    # `commit` has no use for the logits, by far the largest array of a round.
    return state, Speculated(verified._replace(logits=None), accepted, egress)


def _without(controls: Controls, idle: Array) -> Controls:
    """Controls in which idle rows ask for nothing."""
    return controls._replace(
        temperature=jnp.where(idle, 0.0, controls.temperature),
        presence_penalty=jnp.where(idle, 0.0, controls.presence_penalty),
        frequency_penalty=jnp.where(idle, 0.0, controls.frequency_penalty),
        repetition_penalty=jnp.where(idle, 1.0, controls.repetition_penalty),
        stop_from=jnp.where(idle, 0, controls.stop_from),
    )


@partial(jax.jit, donate_argnums=0)
def commit(
    state: SequenceState, verified: Verified, accepted: Accepted, count: Int[Array, "B"]
) -> SequenceState:
    """Commits the first `count[b]` columns of each row; see `round.commit`."""
    return phases.commit(state, verified, accepted, count)


class Programs:
    """The five programs, compiled for the shapes of a state: calling them never compiles.

    Their arguments are those of the functions of this module without `spec` and `weights`.

    Args:
      state, controls: of the batch; only their shapes matter.
      chunk: prompt tokens per prefill.
      report: told about each compilation.
    """

    def __init__(
        self,
        spec: Spec,
        weights: Weights,
        state: SequenceState,
        controls: Controls,
        chunk: int,
        report: Report,
    ):
        batch = state.frontier.shape[0]
        number = jax.ShapeDtypeStruct((), np.int32)
        own = jax.eval_shape(rows.take_controls, controls, number)
        tokens = jax.ShapeDtypeStruct((1, chunk), np.int32)
        count = jax.ShapeDtypeStruct((1,), np.int32)
        per_row = jax.ShapeDtypeStruct((batch,), np.int32)
        seed = jax.ShapeDtypeStruct((), np.uint32)
        _, scratch = jax.eval_shape(partial(speculate, spec), weights, state, controls, per_row)
        lowered = {
            "admit": lambda: admit.lower(state, controls, number, seed, own),
            "prefill": lambda: prefill.lower(spec, weights, state, number, tokens, count),
            "choose_anchor": lambda: choose_anchor.lower(spec, weights, state, controls, number),
            "speculate": lambda: speculate.lower(spec, weights, state, controls, per_row),
            "commit": lambda: commit.lower(state, scratch.verified, scratch.accepted, per_row),
        }
        compiled = {}
        for done, (name, lower) in enumerate(lowered.items(), 1):
            begin = time.perf_counter()
            compiled[name] = lower().compile()
            report(name, time.perf_counter() - begin, done, len(lowered))
        self.admit = compiled["admit"]
        self.commit = compiled["commit"]
        self.prefill = partial(compiled["prefill"], weights)
        self.choose_anchor = partial(compiled["choose_anchor"], weights)
        self.speculate = partial(compiled["speculate"], weights)
