"""The public `generate`: prompts in, one compiled batch, results out."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from dflash_jax.decoding.distribution import Controls, Sampling, make_controls
from dflash_jax.decoding.loop import LENGTH, STOP, Progress, decode, prefill_prompts
from dflash_jax.decoding.result import Generation, Round
from dflash_jax.decoding.spec import MAX_DRAFT_TOKENS, Spec, Weights
from dflash_jax.draft.proposal_head import take_rows
from dflash_jax.io.pair import Pair
from dflash_jax.state.sequence import SequenceState, init_sequences
from dflash_jax.typing import Array, Int

CAPACITY_BUCKET = 256
BUDGET_BUCKET = 64
MAX_ROWS = 8

_REASONS = {STOP: "stop", LENGTH: "length"}


class Job(NamedTuple):
    """A batch ready to run: the arguments of `prefill_prompts` and `decode`.

    `prefill` consumes `state` (it is donated), `decode` consumes what `prefill` returned.
    """

    spec: Spec
    buffer: int
    weights: Weights
    state: SequenceState
    prompts: Int[Array, "B T"]
    lengths: Int[Array, "B"]
    controls: Controls
    budget: Int[Array, "B"]

    def prefill(self) -> SequenceState:
        # Neither the width of a block nor its pending features concern the prompt: left out, one
        # compiled prefill serves every width.
        spec = self.spec
        if spec.draft is not None:
            spec = dataclasses.replace(spec, draft_tokens=1)
        state = self.state._replace(pending=None)
        state = prefill_prompts(
            spec, self.weights, state, self.prompts, self.lengths, self.controls
        )
        return state._replace(pending=self.state.pending)

    def decode(self, state: SequenceState) -> tuple[SequenceState, Progress]:
        return decode(
            self.spec,
            self.buffer,
            self.weights,
            state,
            self.controls,
            self.budget,
        )


def make_weights(pair: Pair) -> Weights:
    """Parameters of a pair with a draft, the rows of its indexed head taken from the target's."""
    params, rows = pair.target_params, None
    if pair.proposal_rows is not None:
        tied = pair.target.tie_word_embeddings
        head = params["model"]["embed_tokens"] if tied else params["lm_head"]
        rows = take_rows(head["weight"], pair.proposal_rows)
    return Weights(params, pair.draft_params, rows, pair.context_role)


def plan(pair: Pair, draft_tokens: int | None = None) -> tuple[Spec, Weights]:
    """What the rounds of a pair depend on, and its weights.

    Args:
      draft_tokens: K; 0 is plain decoding, and then the draft is left out. None is the trained
        block less its anchor (0 without a draft).

    Raises:
      ValueError: a width out of range, or one without a draft.
    """
    if draft_tokens is None:
        draft_tokens = min(pair.draft.block_size - 1, MAX_DRAFT_TOKENS) if pair.draft else 0
    if draft_tokens and pair.draft and draft_tokens >= pair.draft.block_size:
        logging.info(
            "draft_tokens %d is beyond the trained block of %d: acceptance will suffer",
            draft_tokens,
            pair.draft.block_size,
        )
    draft = pair.draft if draft_tokens else None
    context_dtype = pair.context_dtype if draft else None
    spec = Spec(pair.target, draft, draft_tokens, pair.public_vocab, pair.dtype, context_dtype)
    return spec, make_weights(pair) if draft else Weights(pair.target_params, None)


def prepare(
    pair: Pair,
    prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
    *,
    draft_tokens: int | None = None,
    max_new_tokens: int = 128,
    min_new_tokens: int = 0,
    sampling: Sampling | Sequence[Sampling] | None = None,
    seed: int | Sequence[int] = 0,
    ignore_eos: bool = False,
    max_context: int | None = None,
) -> Job:
    """Checks the arguments of `generate` and lays the batch out.

    Capacities are rounded up to buckets and prompts padded, so that other lengths in the same
    buckets do not compile anew.
    """
    rows = _token_rows(pair, prompts)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: got {max_new_tokens}, expected at least 1")
    if not 0 <= min_new_tokens <= max_new_tokens:
        raise ValueError(
            f"min_new_tokens: got {min_new_tokens}, expected 0..{max_new_tokens} (max_new_tokens)"
        )
    spec, weights = plan(pair, draft_tokens)
    samplings = _per_row("sampling", sampling or Sampling(), len(rows), Sampling)
    if isinstance(seed, (int, np.integer)):
        seed = [seed + index for index in range(len(rows))]
    seeds = [value % 2**32 for value in _per_row("seed", seed, len(rows), int)]

    longest = max(map(len, rows))
    buffer = _round_up(max_new_tokens, BUDGET_BUCKET)
    if max_context is None:
        columns = _round_up(longest, CAPACITY_BUCKET)
        capacity = _round_up(columns + buffer, CAPACITY_BUCKET)
    elif longest + max_new_tokens > max_context:
        raise ValueError(
            f"max_context: got {max_context}, expected at least {longest + max_new_tokens} "
            f"(a prompt of {longest} and max_new_tokens {max_new_tokens})"
        )
    else:
        columns = capacity = _round_up(max_context, CAPACITY_BUCKET)
    padded = np.zeros((len(rows), columns), np.int32)
    for index, tokens in enumerate(rows):
        padded[index, : len(tokens)] = tokens
    stop_ids = () if ignore_eos else pair.eos_token_ids
    return Job(
        spec=spec,
        buffer=buffer,
        weights=weights,
        state=init_sequences(
            pair.target,
            spec.draft,
            jnp.asarray(seeds, jnp.uint32),
            capacity,
            spec.width,
            pair.dtype,
            context_dtype=spec.context_dtype,
        ),
        prompts=jnp.asarray(padded),
        lengths=jnp.asarray([len(tokens) for tokens in rows], jnp.int32),
        controls=make_controls(
            samplings, [stop_ids] * len(rows), [len(row) + min_new_tokens for row in rows]
        ),
        budget=jnp.full(len(rows), max_new_tokens, jnp.int32),
    )


def generate(
    pair: Pair,
    prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
    *,
    draft_tokens: int | None = None,
    max_new_tokens: int = 128,
    min_new_tokens: int = 0,
    sampling: Sampling | Sequence[Sampling] | None = None,
    seed: int | Sequence[int] = 0,
    ignore_eos: bool = False,
    max_context: int | None = None,
) -> list[Generation]:
    """Generates from one prompt or a batch of up to 8; nothing leaves the device in between.

    Args:
      pair: from `load_pair`.
      prompts: a string, token ids, or a list of either.
      draft_tokens: K in 0..15; 0 is plain decoding. None is the trained block less its anchor
        (0 without a draft).
      max_new_tokens: tokens each row may publish.
      min_new_tokens: tokens each row publishes before a stop id has any mass.
      sampling: one for all rows or one per row; greedy by default.
      seed: a number s gives row i the seed s + i; a list gives each row its own.
      ignore_eos: stop ids are published like any token.
      max_context: tokens of prompt and output that a row holds, so that batches of any lengths up
        to it share one compiled program; None is the smallest bucket that holds this batch.

    Returns:
      One `Generation` per prompt.

    Raises:
      ValueError: a prompt that is empty or has ids outside the vocabulary, or an argument out of
        range; the message names it.
    """
    job = prepare(
        pair,
        prompts,
        draft_tokens=draft_tokens,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        sampling=sampling,
        seed=seed,
        ignore_eos=ignore_eos,
        max_context=max_context,
    )
    _, progress = job.decode(job.prefill())
    return read_results(pair, job, progress)


def read_results(pair: Pair, job: Job, progress: Progress) -> list[Generation]:
    """Brings a finished batch to the host, one `Generation` per row."""
    progress = jax.device_get(progress)
    return [_read_row(pair, job.spec, progress, row) for row in range(len(progress.emitted))]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _token_rows(pair, prompts) -> list[list[int]]:
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], (int, np.integer))):
        prompts = [prompts]
    if not 1 <= len(prompts) <= MAX_ROWS:
        raise ValueError(f"prompts: got {len(prompts)}, expected 1..{MAX_ROWS}")
    return [prompt_tokens(pair, p, f"prompt {index}") for index, p in enumerate(prompts)]


def prompt_tokens(pair: Pair, prompt: str | Sequence[int], name: str = "prompt") -> list[int]:
    """Token ids of a prompt given as text or as ids; errors call it `name`."""
    if isinstance(prompt, str):
        if pair.tokenizer is None:
            raise ValueError(f"{name} is text, but the target has no tokenizer.json")
        prompt = pair.tokenizer.encode(prompt)
    tokens = [int(token) for token in prompt]
    if not tokens:
        raise ValueError(f"{name} is empty, expected at least one token")
    for at, token in enumerate(tokens):
        if not 0 <= token < pair.target.vocab_size:
            raise ValueError(
                f"{name}, position {at}: token id {token}, expected 0..{pair.target.vocab_size - 1}"
            )
    return tokens


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
        rounds.append(Round(spec.proposed(verified), verified, accepted, committed))
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
