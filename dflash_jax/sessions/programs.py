"""The engine's compiled programs for a width and a number of rows, made before any request.

    install                   a row gets a sequence, empty or restored, and its controls
    prefill, choose_anchor    one row, one chunk of its prompt; after the last, its first token
    speculate                 all decoding rows: catch_up, propose, verify, accept
    commit                    all rows, the first N[b] columns
    catch_up, dense_of        a row's sequence is made complete and copied
    read_pages, write_pages   pages leave the device and come back

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
from dflash_jax.state import paged
from dflash_jax.state.counts import TokenCounts
from dflash_jax.state.paged import Pages, copy_page
from dflash_jax.state.sequence import SequenceState
from dflash_jax.typing import Array, Bool, Int

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
def install(
    state: SequenceState,
    controls: Controls,
    row: Int[Array, ""],
    table: Int[Array, "N"],
    copied: Int[Array, "2"],
    dense: rows.Dense,
    numbers: rows.Numbers,
    counts: TokenCounts,
    own: Controls,
) -> tuple[SequenceState, Controls]:
    """Puts a sequence and its request's controls into a row.

    Args:
      copied: a page that it may read but not write to, and the one of its own that takes its
        place; outside the pool where there is none.
    """
    pools = tuple(copy_page(pool, *copied) for pool in rows.pools(state))
    state = rows.install(rows.with_pools(state, pools), row, table, dense, numbers, counts)
    return state, rows.put_controls(controls, row, own)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def catch_up(
    spec: Spec, weights: Weights, state: SequenceState, active: Bool[Array, "B"]
) -> SequenceState:
    """Moves the pending features of active rows into the draft context, as `speculate` does."""
    return phases.catch_up(spec, weights, state, active)


@jax.jit
def dense_of(state: SequenceState, row: Int[Array, ""]) -> rows.Dense:
    """A row's arrays that lie in no page: copies, which outlive the donated state."""
    return rows.dense_of(state, row)


@jax.jit
def read_pages(state: SequenceState, pages: Int[Array, "N"]) -> tuple[Pages, ...]:
    """Contents of pages in every paged store."""
    return tuple(paged.read_pages(pool, pages) for pool in rows.pools(state))


@partial(jax.jit, donate_argnums=0)
def write_pages(
    state: SequenceState, pages: Int[Array, "N"], contents: tuple[Pages, ...]
) -> SequenceState:
    """The reverse of `read_pages`."""
    written = (
        paged.write_pages(pool, pages, content)
        for pool, content in zip(rows.pools(state), contents, strict=True)
    )
    return rows.with_pools(state, tuple(written))


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
    # The pages of a row that sits out may be another's by now.
    state = phases.catch_up(spec, weights, state, active)
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
        numbers = rows.Numbers(number, number, jax.ShapeDtypeStruct((), np.uint32))
        one = jax.eval_shape(rows.take, state, number)
        own = jax.eval_shape(rows.take_controls, controls, number)
        dense = jax.eval_shape(rows.dense_of, state, number)
        table = jax.ShapeDtypeStruct(one.target.kv.block_table.shape[1:], np.int32)
        pair = jax.ShapeDtypeStruct((2,), np.int32)
        contents = jax.eval_shape(read_pages, state, table)
        tokens = jax.ShapeDtypeStruct((1, chunk), np.int32)
        count = jax.ShapeDtypeStruct((1,), np.int32)
        per_row = jax.ShapeDtypeStruct((batch,), np.int32)
        active = jax.ShapeDtypeStruct((batch,), np.bool_)
        _, scratch = jax.eval_shape(partial(speculate, spec), weights, state, controls, per_row)
        lowered = {
            "install": lambda: install.lower(
                state, controls, number, table, pair, dense, numbers, one.counts, own
            ),
            "prefill": lambda: prefill.lower(spec, weights, state, number, tokens, count),
            "choose_anchor": lambda: choose_anchor.lower(spec, weights, state, controls, number),
            "speculate": lambda: speculate.lower(spec, weights, state, controls, per_row),
            "commit": lambda: commit.lower(state, scratch.verified, scratch.accepted, per_row),
            "catch_up": lambda: catch_up.lower(spec, weights, state, active),
            "dense_of": lambda: dense_of.lower(state, number),
            "read_pages": lambda: read_pages.lower(state, table),
            "write_pages": lambda: write_pages.lower(state, table, contents),
        }
        compiled = {}
        for done, (name, lower) in enumerate(lowered.items(), 1):
            begin = time.perf_counter()
            compiled[name] = lower().compile()
            report(name, time.perf_counter() - begin, done, len(lowered))
        self.install = compiled["install"]
        self.commit = compiled["commit"]
        self.dense_of = compiled["dense_of"]
        self.read_pages = compiled["read_pages"]
        self.write_pages = compiled["write_pages"]
        self.prefill = partial(compiled["prefill"], weights)
        self.choose_anchor = partial(compiled["choose_anchor"], weights)
        self.speculate = partial(compiled["speculate"], weights)
        self.catch_up = partial(compiled["catch_up"], weights)
        self.workspace = max(
            program.memory_analysis().temp_size_in_bytes for program in compiled.values()
        )
