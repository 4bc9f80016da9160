"""Pallas-Triton form: all energies side by side, then one warp per row walks through them."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.triton_call import load, padded_size, store, triton_call


def _codebook_row(ref, token, channel):
    """Rows of a codebook `[V, R]` in float32; NaN for an id outside it, never another's row."""
    vocabulary, rank = ref.shape
    known = (token >= 0) & (token < vocabulary) & (channel < rank)
    row = load(ref, (token, channel), known).astype(jnp.float32)
    return jnp.where(known | (channel >= rank), row, jnp.nan)


def _lattice_kernel(scores, candidates, projected, predecessor, successor, anchor, energy):
    # scores, candidates [B, K, C]; projected [B, K, R]; predecessor, successor [V, R]; anchor [B]
    # energy [B, K, C, C]: predecessor rank, then candidate rank
    ranks, rank = scores.shape[2], projected.shape[2]
    before, column, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    candidate, channel = jnp.arange(padded_size(ranks)), jnp.arange(padded_size(rank))
    on = candidate < ranks

    # Every predecessor of the first column is the anchor.
    previous = candidates[row, jnp.maximum(column - 1, 0), before]
    token = jnp.where(column == 0, anchor[row], previous)
    gate = load(projected, (row, column, channel), channel < rank).astype(jnp.float32)
    gated = _codebook_row(predecessor, token, channel) * gate
    ids = load(candidates, (row, column, candidate), on)
    after = _codebook_row(successor, ids[:, None], channel[None, :])
    pair = jnp.sum(gated[None, :] * after, axis=1)
    unary = load(scores, (row, column, candidate), on).astype(jnp.float32)
    store(energy, (row, column, before, candidate), unary + pair, on)


def _walk_kernel(energy, candidates, temperature, uniforms, tokens, choices, laws):
    # energy [B, K, C, C]; candidates [B, K, C]; temperature [B]; uniforms [B, K]
    # tokens, choices [B, K]; laws [B, K, C]
    columns, ranks = candidates.shape[1:]
    row, rank = pl.program_id(0), jnp.arange(padded_size(ranks))
    on = rank < ranks
    heat = temperature[row]
    sampled = heat > 0
    divisor = jnp.where(sampled, heat, 1.0)

    def step(column, before):
        scores = load(energy, (row, column, before, rank), on, -jnp.inf)
        best = jnp.max(scores)
        # Ties go to the lowest rank; energies that are not numbers stay inside the list.
        greedy = jnp.min(jnp.where(scores == best, rank, ranks - 1))
        # The best energy is subtracted before the division: E / T may overflow for a small T.
        weights = jnp.where(on, jnp.exp((scores - best) / divisor), 0.0)
        law = weights / jnp.sum(weights)

        # The first candidate with mass whose cumulative sum exceeds the uniform; rounding may
        # leave no such one for a uniform next to 1: then the last candidate with mass.
        possible = law > 0
        beyond = possible & (jnp.cumsum(law) > uniforms[row, column])
        drawn = jnp.min(jnp.where(beyond, rank, ranks))
        last = jnp.max(jnp.where(possible, rank, 0))
        choice = jnp.where(sampled, jnp.minimum(drawn, last), greedy)

        chosen = rank == choice
        ids = load(candidates, (row, column, rank), on)
        tokens[row, column] = jnp.sum(jnp.where(chosen, ids, 0))
        choices[row, column] = choice
        kept = jnp.where(sampled, law, chosen.astype(jnp.float32))
        store(laws, (row, column, rank), kept, on)
        return choice

    jax.lax.fori_loop(0, columns, step, jnp.int32(0))


def lattice(
    scores, candidates, projected, predecessor, successor, anchor, *, interpret=False
):
    """Energies `[B, K, C, C]` float32 of every candidate after every predecessor.

    Entry `[b, i, p, c]` is `E_i[p, c]` of the specification; the rows p of the first column are
    all the anchor's. Arguments as in `api.candidate_selector`.
    """
    rows, columns, ranks = scores.shape
    return triton_call(
        _lattice_kernel,
        name="candidate_lattice",
        out_shape=jax.ShapeDtypeStruct((rows, columns, ranks, ranks), jnp.float32),
        grid=(ranks, columns, rows),
        operands=(scores, candidates, projected, predecessor, successor, anchor),
        num_warps=4,
        interpret=interpret,
    )


def candidate_selector(
    scores,
    candidates,
    projected,
    predecessor,
    successor,
    anchor,
    temperature,
    uniforms,
    *,
    interpret=False,
):
    """See `api.candidate_selector`."""
    rows, columns, ranks = scores.shape
    candidates, anchor = candidates.astype(jnp.int32), anchor.astype(jnp.int32)
    energy = lattice(
        scores, candidates, projected, predecessor, successor, anchor, interpret=interpret
    )
    return triton_call(
        _walk_kernel,
        name="candidate_walk",
        out_shape=(
            jax.ShapeDtypeStruct((rows, columns), jnp.int32),
            jax.ShapeDtypeStruct((rows, columns), jnp.int32),
            jax.ShapeDtypeStruct((rows, columns, ranks), jnp.float32),
        ),
        grid=(rows,),
        operands=(energy, candidates, temperature, uniforms),
        num_warps=1,
        interpret=interpret,
    )
