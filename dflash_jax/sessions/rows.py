"""Single rows of a batch: taken out, put back, given to another sequence.

Every per-row array moves here together.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.decoding.distribution import Controls
from dflash_jax.state.counts import TokenCounts
from dflash_jax.state.gdn import GDNState
from dflash_jax.state.paged import PagedKV
from dflash_jax.state.ring import RingKV
from dflash_jax.state.sequence import DraftContext, SequenceState, TargetCache
from dflash_jax.typing import Array, Float, Int, UInt32

# A pool of pages belongs to all rows: one row reaches its own pages through its block table.
SHARED = -1
_PAGED = PagedKV(key=SHARED, value=SHARED, block_table=0)


def row_axes(state: SequenceState) -> SequenceState:
    """The axis along which rows lie, for every array of a state; SHARED for pools of pages.

    Written out field by field: a field that is added to a state and not here is an error.
    """
    draft = state.draft
    if draft is not None:
        draft = DraftContext(
            ring=None if draft.ring is None else RingKV(key=1, value=1),
            pages=None if draft.pages is None else _PAGED,
        )
    return SequenceState(
        frontier=0,
        context_frontier=0,
        anchor=0,
        hidden=0,
        seed=0,
        target=TargetCache(kv=_PAGED, gdn=GDNState(recurrent=1, conv=1)),
        draft=draft,
        pending=None if state.pending is None else 0,
        counts=TokenCounts(prompt=0, output=0),
    )


def take(state: SequenceState, row: Int[Array, ""]) -> SequenceState:
    """One row as a batch of one; the pools stay whole."""

    def slice_of(axis, leaf):
        if axis == SHARED:
            return leaf
        return jax.lax.dynamic_slice_in_dim(leaf, row, 1, axis)

    return jax.tree.map(slice_of, row_axes(state), state)


def put(state: SequenceState, row: Int[Array, ""], one: SequenceState) -> SequenceState:
    """The batch with `one` in place of a row, and the pools as `one` left them."""

    def replaced(axis, leaf, new):
        if axis == SHARED:
            return new
        return jax.lax.dynamic_update_slice_in_dim(leaf, new, row, axis)

    return jax.tree.map(replaced, row_axes(state), state, one)


class Dense(NamedTuple):
    """What a sequence has outside the pages, as a batch of one; `ring` as in `DraftContext`."""

    hidden: Float[Array, "1 H"]
    gdn: GDNState
    ring: RingKV | None


class Numbers(NamedTuple):
    """Scalars of a row: F and F_ctx, which are equal here, x_F, and the request's seed."""

    frontier: Int[Array, ""]
    anchor: Int[Array, ""]
    seed: UInt32[Array, ""]


def dense_of(state: SequenceState, row: Int[Array, ""]) -> Dense:
    """Copies of a row's arrays that lie in no page."""
    one = take(state, row)
    return Dense(one.hidden, one.target.gdn, None if one.draft is None else one.draft.ring)


def install(
    state: SequenceState,
    row: Int[Array, ""],
    table: Int[Array, "N"],
    dense: Dense,
    numbers: Numbers,
    counts: TokenCounts,
) -> SequenceState:
    """The batch with another sequence in a row: nothing of who was there before is left.

    Args:
      table: the row's pages, for every paged store.
      dense, numbers, counts: the sequence, with its features in the draft context.
    """
    one = take(state, row)

    def renamed(pool):
        return pool._replace(block_table=table[None])

    draft = one.draft
    if draft is not None:
        pages = None if draft.pages is None else renamed(draft.pages)
        draft = DraftContext(dense.ring, pages)
    frontier = jnp.full_like(one.frontier, numbers.frontier)
    return put(
        state,
        row,
        SequenceState(
            frontier=frontier,
            context_frontier=frontier,
            anchor=jnp.full_like(one.anchor, numbers.anchor),
            hidden=dense.hidden,
            seed=jnp.full_like(one.seed, numbers.seed),
            target=TargetCache(renamed(one.target.kv), dense.gdn),
            draft=draft,
            pending=None if one.pending is None else jnp.zeros_like(one.pending),
            counts=counts,
        ),
    )


def pools(state: SequenceState) -> tuple[PagedKV, ...]:
    """The paged stores of a state, the target's first."""
    draft = state.draft
    full = () if draft is None or draft.pages is None else (draft.pages,)
    return (state.target.kv, *full)


def with_pools(state: SequenceState, changed: tuple[PagedKV, ...]) -> SequenceState:
    """The state with these paged stores, in the order of `pools`."""
    state = state._replace(target=state.target._replace(kv=changed[0]))
    if len(changed) == 2:
        state = state._replace(draft=state.draft._replace(pages=changed[1]))
    return state


def take_controls(controls: Controls, row: Int[Array, ""]) -> Controls:
    """One row's controls."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, row, 1), controls)


def put_controls(controls: Controls, row: Int[Array, ""], one: Controls) -> Controls:
    """The controls with `one` in place of a row's."""
    return jax.tree.map(
        lambda leaf, new: jax.lax.dynamic_update_slice_in_dim(leaf, new, row, 0), controls, one
    )
