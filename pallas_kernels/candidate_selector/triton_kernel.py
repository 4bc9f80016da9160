"""The walk as a Triton kernel; imported only where it is asked for, since it needs `triton`."""

import triton
import triton.language as tl


@triton.jit
def candidate_walk(
    scores,  # [B, K, C] float32
    candidates,  # [B, K, C] int32
    projected,  # [B, K, R]
    predecessor,  # [V, R]
    successor,  # [V, R]
    anchor,  # [B] int32
    temperature,  # [B] float32
    uniforms,  # [B, K] float32
    tokens,  # [B, K] int32, written
    choices,  # [B, K] int32, written
    laws,  # [B, K, C] float32, written
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    RANK: tl.constexpr,
    VOCABULARY: tl.constexpr,
    PADDED_RANKS: tl.constexpr,
    PADDED_RANK: tl.constexpr,
):
    """One program per row: each column's energies after the token really chosen before it."""
    row = tl.program_id(0)
    rank, channel = tl.arange(0, PADDED_RANKS), tl.arange(0, PADDED_RANK)
    on, on_channel = rank < RANKS, channel < RANK
    heat = tl.load(temperature + row)
    divisor = tl.where(heat > 0, heat, 1.0)
    token = tl.load(anchor + row)
    for column in range(COLUMNS):
        at = row * COLUMNS + column
        gate = tl.load(projected + at * RANK + channel, mask=on_channel, other=0.0)
        # An id outside the codebook reads NaN, never another's row. As a vector: the interpreter
        # makes integers of `vector & scalar`.
        tokens_before = tl.zeros((PADDED_RANK,), tl.int64) + token
        known = on_channel & (tokens_before >= 0) & (tokens_before < VOCABULARY)
        address = predecessor + tokens_before * RANK + channel
        before = tl.load(address, mask=known, other=float("nan")).to(tl.float32)
        gated = tl.where(on_channel, before * gate.to(tl.float32), 0.0)

        ids = tl.load(candidates + at * RANKS + rank, mask=on, other=0)
        known_ids = (ids >= 0) & (ids < VOCABULARY)
        address = successor + ids.to(tl.int64)[:, None] * RANK + channel[None, :]
        mask = known_ids[:, None] & on_channel[None, :]
        after = tl.load(address, mask=mask, other=float("nan")).to(tl.float32)
        products = tl.where(on_channel[None, :], gated[None, :] * after, 0.0)
        unary = tl.load(scores + at * RANKS + rank, mask=on, other=0.0)
        energy = tl.where(on, unary + tl.sum(products, axis=1), float("-inf"))

        # From here on as in the Pallas form.
        best = tl.max(energy, axis=0)
        greedy = tl.min(tl.where(energy == best, rank, RANKS - 1), axis=0)
        weights = tl.where(on, tl.exp((energy - best) / divisor), 0.0)
        law = weights / tl.sum(weights, axis=0)
        possible = law > 0
        beyond = possible & (tl.cumsum(law, axis=0) > tl.load(uniforms + at))
        drawn = tl.min(tl.where(beyond, rank, RANKS), axis=0)
        last = tl.max(tl.where(possible, rank, 0), axis=0)
        choice = tl.where(heat > 0, tl.minimum(drawn, last), greedy)

        chosen = rank == choice
        token = tl.sum(tl.where(chosen, ids, 0), axis=0)
        tl.store(tokens + at, token)
        tl.store(choices + at, choice)
        kept = tl.where(heat > 0, law, chosen.to(tl.float32))
        tl.store(laws + at * RANKS + rank, kept, mask=on)
