"""A whole generation on the device: prefill, then rounds, both as one compiled loop each."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decoding import round as phases
from dflash_jax.decoding.distribution import Controls, Sampling, make_controls
from dflash_jax.decoding.result import Generation, Round
from dflash_jax.decoding.round import Spec, Weights
from dflash_jax.io.pair import Pair
from dflash_jax.state.sequence import SequenceState, init_sequences
from dflash_jax.typing import Array, Int

PREFILL_CHUNK = 64
CAPACITY_BUCKET = 256
BUDGET_BUCKET = 64
MAX_ROWS = 8

RUNNING, STOP, LENGTH = 0, 1, 2
_REASONS = {STOP: "stop", LENGTH: "length"}


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
    stop_ids: Int[Array, "E"],
) -> tuple[SequenceState, Progress]:
    """Rounds until every row has stopped or used its budget.

    Args:
      buffer: columns of the output arrays, at least the largest budget.
      budget: tokens each row may publish, >= 1; the anchor in `state` is the first of them.
      stop_ids: ids that end a row when published; may be empty.
    """
    rows = budget.shape[0]
    blank = jnp.full((rows, buffer), -1, jnp.int32)

    def is_stop(tokens):
        return jnp.any(tokens[..., None] == stop_ids, axis=-1)

    def status_of(stopped, emitted):
        return jnp.where(stopped, STOP, jnp.where(emitted >= budget, LENGTH, RUNNING))

    emitted = jnp.ones(rows, jnp.int32)
    progress = Progress(
        tokens=blank.at[:, 0].set(state.anchor),
        emitted=emitted,
        status=status_of(is_stop(state.anchor), emitted),
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


def make_spec(pair: Pair, draft_tokens: int) -> Spec:
    """The statics of a round; `draft_tokens` 0 leaves the draft out."""
    draft = pair.draft if draft_tokens else None
    return Spec(pair.target, draft, draft_tokens, pair.public_vocab, pair.dtype)


def make_weights(pair: Pair, spec: Spec) -> Weights:
    return Weights(pair.target_params, pair.draft_params if spec.draft else None)


def generate(
    pair: Pair,
    prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
    *,
    draft_tokens: int | None = None,
    max_new_tokens: int = 128,
    sampling: Sampling | Sequence[Sampling] | None = None,
    seed: int | Sequence[int] = 0,
    ignore_eos: bool = False,
) -> list[Generation]:
    """Generates from one prompt or a batch of up to 8, all in one compiled loop.

    Args:
      pair: from `load_pair`.
      prompts: a string, token ids, or a list of either.
      draft_tokens: K in 0..15; 0 is plain decoding. None is the trained block less its anchor
        (0 without a draft).
      max_new_tokens: tokens each row may publish.
      sampling: one for all rows or one per row; greedy by default.
      seed: a number s gives row i the seed s + i; a list gives each row its own.
      ignore_eos: stop ids are published like any token.

    Returns:
      One `Generation` per prompt.

    Raises:
      ValueError: a prompt that is empty or has ids outside the vocabulary, or an argument out of
        range; the message names it.
    """
    rows = _token_rows(pair, prompts)
    if draft_tokens is None:
        draft_tokens = min(pair.draft.block_size - 1, 15) if pair.draft else 0
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: got {max_new_tokens}, expected at least 1")
    spec = make_spec(pair, draft_tokens)
    weights = make_weights(pair, spec)
    samplings = _per_row("sampling", sampling or Sampling(), len(rows), Sampling)
    if isinstance(seed, int):
        seed = [seed + index for index in range(len(rows))]
    seeds = _per_row("seed", list(seed), len(rows), int)

    longest = max(map(len, rows))
    padded = np.zeros((len(rows), _round_up(longest, CAPACITY_BUCKET)), np.int32)
    for index, tokens in enumerate(rows):
        padded[index, : len(tokens)] = tokens
    lengths = jnp.asarray([len(tokens) for tokens in rows], jnp.int32)
    buffer = _round_up(max_new_tokens, BUDGET_BUCKET)
    capacity = _round_up(padded.shape[1] + buffer + spec.width, CAPACITY_BUCKET)
    state = init_sequences(
        pair.target,
        spec.draft,
        jnp.asarray([s % 2**32 for s in seeds], jnp.uint32),
        capacity,
        spec.width,
        pair.dtype,
    )
    controls = make_controls(samplings)
    stop_ids = jnp.asarray(() if ignore_eos else pair.eos_token_ids, jnp.int32)
    budget = jnp.full(len(rows), max_new_tokens, jnp.int32)
    state = prefill_prompts(spec, weights, state, jnp.asarray(padded), lengths, controls)
    _, progress = decode(spec, buffer, weights, state, controls, budget, stop_ids)
    progress = jax.device_get(progress)
    return [_read_row(pair, spec, progress, row) for row in range(len(rows))]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _token_rows(pair, prompts) -> list[list[int]]:
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], (int, np.integer))):
        prompts = [prompts]
    if not 1 <= len(prompts) <= MAX_ROWS:
        raise ValueError(f"prompts: got {len(prompts)}, expected 1..{MAX_ROWS}")
    rows = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if pair.tokenizer is None:
                raise ValueError(f"prompt {index} is text, but the target has no tokenizer.json")
            prompt = pair.tokenizer.encode(prompt)
        tokens = [int(token) for token in prompt]
        if not tokens:
            raise ValueError(f"prompt {index} is empty, expected at least one token")
        for at, token in enumerate(tokens):
            if not 0 <= token < pair.target.vocab_size:
                raise ValueError(
                    f"prompt {index}, position {at}: token id {token}, expected "
                    f"0..{pair.target.vocab_size - 1}"
                )
        rows.append(tokens)
    return rows


def _per_row(name, values, rows, kind) -> list:
    if isinstance(values, kind):
        return [values] * rows
    values = list(values)
    if len(values) != rows:
        raise ValueError(f"{name}: got {len(values)} values for {rows} prompts")
    return values


def _read_row(pair: Pair, spec: Spec, progress: Progress, row: int) -> Generation:
    tokens = progress.tokens[row, : progress.emitted[row]].tolist()
    rounds = []
    for index in range(int(progress.rounds)):
        verified, accepted, committed = (
            int(array[row, index])
            for array in (progress.verified, progress.accepted, progress.committed)
        )
        if verified < 0:
            break  # rows sit out only after their end
        # DFlash2 computes its whole block even when only a prefix can be verified.
        whole = spec.draft is not None and spec.draft.dflash2
        rounds.append(
            Round(spec.draft_tokens if whole else verified, verified, accepted, committed)
        )
    stopped = int(progress.status[row]) == STOP
    shown = tokens[:-1] if stopped else tokens
    return Generation(
        tokens=tokens,
        text=pair.tokenizer.decode(shown) if pair.tokenizer else None,
        finish_reason=_REASONS[int(progress.status[row])],
        rounds=rounds,
        draft_tokens=spec.draft_tokens,
        block_attention=spec.draft.causality.value if spec.draft else None,
    )
