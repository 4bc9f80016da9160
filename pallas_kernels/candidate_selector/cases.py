"""The op at real shapes."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.candidate_selector.api import candidate_selector
from pallas_kernels.shapes import GEOMETRIES, Case, Geometry


def _operands(key, geometry: Geometry, rows: int):
    draft, dtype = geometry.draft, jnp.dtype(geometry.dtype)
    vocabulary = geometry.target.vocabulary
    keys = jax.random.split(key, 7)
    lists = (rows, draft.columns - 1, draft.selector_top_k)
    projected = (*lists[:2], draft.selector_rank)
    return (
        -jnp.sort(-jax.random.normal(keys[0], lists)),
        jax.random.randint(keys[1], lists, 0, vocabulary),
        jax.random.normal(keys[2], projected, dtype) / draft.selector_rank**0.5,
        jax.random.normal(keys[3], (vocabulary, draft.selector_rank), dtype),
        jax.random.normal(keys[4], (vocabulary, draft.selector_rank), dtype),
        jax.random.randint(keys[5], (rows,), 0, vocabulary),
        jnp.linspace(0.0, 1.0, rows),
        jax.random.uniform(keys[6], lists[:2]),
    )


def cases() -> Iterator[Case]:
    """Geometries of DFlash2; a greedy row and sampled ones."""
    for geometry in GEOMETRIES:
        draft, itemsize = geometry.draft, jnp.dtype(geometry.dtype).itemsize
        if not draft.selector_rank:
            continue
        for rows in geometry.rows:
            steps, ranks = rows * (draft.columns - 1), draft.selector_top_k
            row = draft.selector_rank * itemsize  # of a codebook
            # Scores, ids and q; token and choice.
            lists, results = steps * ranks * (4 + 4), steps * (ranks * 4 + 2 * 4)
            yield Case(
                op="candidate_selector",
                shape=f"{geometry.name} B={rows}",
                run=candidate_selector,
                operands=functools.partial(_operands, geometry=geometry, rows=rows),
                # A step needs one predecessor, one projected column and all candidates.
                minimum_bytes=steps * (ranks + 2) * row + lists + results + steps * 4,
                # The lattice has every predecessor: its energies are written, one row is read.
                moved_bytes=(
                    steps * ranks * (ranks + 2) * row
                    + steps * ranks * ranks * (4 + 4 + 4)
                    + steps * ranks * (4 + 4)
                    + results
                ),
                # Predecessor times projection, then product and sum per candidate.
                flops=steps * draft.selector_rank * (1 + 2 * ranks),
            )
