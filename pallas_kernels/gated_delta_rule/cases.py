"""The op at real shapes."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_rule.api import fold, prefill, verify
from pallas_kernels.gated_delta_rule.pallas import STRIP
from pallas_kernels.gated_delta_rule.pallas_prefill import CHUNK
from pallas_kernels.gated_delta_rule.pallas_prefill import STRIP as WALK
from pallas_kernels.shapes import GEOMETRIES, Case, Target

_PREFILL = 2048  # tokens of a chunk of the prompt


def _operands(key, target: Target, rows, tokens, dtype, part):
    stacked = (target.gdn_layers, rows)
    lead = stacked if part == "fold" else (rows,)
    keys = jax.random.split(key, 6)
    heads, dim = target.gdn_value_heads, target.gdn_head_dim
    query, record = (
        jax.random.normal(k, (*lead, tokens, target.gdn_key_heads, dim), dtype) for k in keys[:2]
    )
    value = jax.random.normal(keys[2], (*lead, tokens, heads, dim), dtype)
    g = -jax.random.exponential(keys[3], (*lead, tokens, heads))
    beta = jax.random.uniform(keys[4], (*lead, tokens, heads))
    # Verify takes its layer out of the stack itself.
    before = (rows,) if part == "prefill" else stacked
    state = jax.random.normal(keys[5], (*before, heads, dim, dim))
    live = jnp.full(rows, tokens, jnp.int32)
    if part == "fold":
        return state, record, value, g, beta, live
    return query, record, value, g, beta, state, live


def _case(geometry, rows, tokens, part) -> Case:
    target, dtype = geometry.target, jnp.dtype(geometry.dtype)
    heads, dim = target.gdn_value_heads, target.gdn_head_dim
    layers = target.gdn_layers if part == "fold" else 1
    columns = layers * rows * tokens
    states = layers * rows * heads * dim * dim * 4
    keys = columns * target.gdn_key_heads * dim * dtype.itemsize  # of a key, or of a query
    values, gates = columns * heads * dim * dtype.itemsize, 2 * columns * heads * 4
    outputs = columns * heads * dim * 4
    # Every strip of every value head reads its key head again.
    strips = heads // target.gdn_key_heads * -(-dim // (WALK if part == "prefill" else STRIP))
    if part == "fold":
        minimum = 2 * states + keys + values + gates
        moved = 2 * states + strips * keys + values + gates
        flops = 5 * columns * heads * dim * dim
    elif part == "verify":
        minimum = states + 2 * keys + values + gates + outputs
        moved = states + 2 * strips * keys + values + gates + outputs
        # Decay, error, update and output: 1 + 2 + 2 + 2 per entry of the state.
        flops = 7 * columns * heads * dim * dim
    else:
        minimum = 2 * states + 2 * keys + values + gates + outputs
        # Written by one kernel and read by the other: fresh once; the rest by every strip.
        fresh, rest = columns * heads * dim * 4, columns * heads * (dim + CHUNK) * 4
        ratio = heads // target.gdn_key_heads
        moved = (
            minimum + 2 * (ratio - 1 + strips) * keys
            + 2 * fresh + (1 + strips // ratio) * rest
        )  # fmt: skip
        chunk = 2 * CHUNK * CHUNK * (2 * dim + 3 * dim)  # keys, scores; carried, fresh, output
        chunk += CHUNK**3 // 3 + 3 * 2 * CHUNK * dim * dim  # inverse; three with the state
        flops = columns // CHUNK * heads * chunk
    return Case(
        op=f"gated_delta_rule.{part}",
        shape=f"{geometry.name} B={rows}",
        run={
            "verify": functools.partial(verify, layer=target.gdn_layers - 1),
            "fold": fold,
            "prefill": prefill,
        }[part],
        operands=functools.partial(
            _operands, target=target, rows=rows, tokens=tokens, dtype=dtype, part=part
        ),
        minimum_bytes=minimum,
        moved_bytes=moved,
        flops=flops,
        in_place=(0,) if part == "fold" else (),
    )


def cases() -> Iterator[Case]:
    """Verify of one layer, Fold of all layers, and a chunk of a prompt in one layer."""
    seen = set()
    for geometry in GEOMETRIES:
        target = geometry.target
        heads = (target.gdn_key_heads, target.gdn_value_heads, target.gdn_head_dim)
        kernel = (*heads, geometry.draft.columns, geometry.dtype)
        if kernel in seen:  # the layers are only a grid size
            continue
        seen.add(kernel)
        for rows in geometry.rows:
            yield _case(geometry, rows, geometry.draft.columns, "verify")
            yield _case(geometry, rows, geometry.draft.columns, "fold")
            yield _case(geometry, rows, _PREFILL, "prefill")
