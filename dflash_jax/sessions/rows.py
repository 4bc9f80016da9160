"""Single rows of a batch: taken out, put back, emptied. Every per-row array moves here together."""

import jax
import jax.numpy as jnp

from dflash_jax.decoding.distribution import Controls
from dflash_jax.state.counts import TokenCounts
from dflash_jax.state.gdn import GDNState
from dflash_jax.state.paged import PagedKV
from dflash_jax.state.ring import RingKV
from dflash_jax.state.sequence import DraftContext, SequenceState, TargetCache
from dflash_jax.typing import Array, Int

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


def empty(state: SequenceState, row: Int[Array, ""], seed: Int[Array, ""]) -> SequenceState:
    """The batch with a row as before any token; it keeps its pages, whose bytes are unreachable."""
    one = take(state, row)

    def cleared(axis, leaf):
        return leaf if axis == SHARED else jnp.zeros_like(leaf)

    blank = jax.tree.map(cleared, row_axes(one), one)
    kv = blank.target.kv._replace(block_table=one.target.kv.block_table)
    draft = blank.draft
    if draft is not None and draft.pages is not None:
        pages = draft.pages._replace(block_table=one.draft.pages.block_table)
        draft = draft._replace(pages=pages)
    blank = blank._replace(
        seed=jnp.full_like(one.seed, seed), target=blank.target._replace(kv=kv), draft=draft
    )
    return put(state, row, blank)


def take_controls(controls: Controls, row: Int[Array, ""]) -> Controls:
    """One row's controls."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, row, 1), controls)


def put_controls(controls: Controls, row: Int[Array, ""], one: Controls) -> Controls:
    """The controls with `one` in place of a row's."""
    return jax.tree.map(
        lambda leaf, new: jax.lax.dynamic_update_slice_in_dim(leaf, new, row, 0), controls, one
    )
