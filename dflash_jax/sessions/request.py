"""A request: what is asked for, and what has come of it so far."""

import dataclasses
import itertools
import math
import secrets
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from dflash_jax.decoding.distribution import Sampling
from dflash_jax.decoding.result import Round, acceptance_length, accepted_per_position

if TYPE_CHECKING:
    from dflash_jax.sessions.checkpoint import Checkpoint

SEEDS = 2**32

# Counts up from a random start: unseeded requests differ from run to run and surely among
# themselves, which independent draws would not.
_unseeded = itertools.count(secrets.randbits(32))


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Sums over a request's rounds.

    rounds: how many. proposed, verified, accepted, committed: sums of `Round`'s fields; the first
      token is chosen by the prefill and belongs to no round.
    acceptance_length: tau, mean of accepted + 1 over rounds that verified proposals.
    accepted_per_position: for i = 1..K the share of the rounds that verified i proposals which
      accepted i of them.
    """

    rounds: int
    proposed: int
    verified: int
    accepted: int
    committed: int
    acceptance_length: float
    accepted_per_position: list[float]


@dataclasses.dataclass(eq=False)
class Request:
    """One generation of an `Engine`; `Engine.submit` makes them.

    Asked for:
      prompt: token ids.
      sampling: greedy by default.
      seed: 0..2**32 - 1; None draws one, different for every request, and stores it here.
      max_new_tokens: the budget, at least 1.
      min_new_tokens: tokens published before a stop id has any mass and before a stop string
        that they complete counts.
      stop: strings that end the text, which is cut before them.
      eos_ids: ids that end the request when published; their text is left out.
      ignore_eos: those ids are published like any token.
      suffix_tokens: so many tokens at the prompt's end belong to this turn only (the opening of an
        answer, say), and its turn checkpoint stands before them.
      on_text: called with each piece of text after its tokens are committed. What it raises ends
        this request alone.

    Said by the engine at submission: draft_tokens, the effective K, and block_attention, the
    causality rule in force, as in `Generation`; origin, the checkpoint that it starts from, as
    long as it waits.

    Grows while the engine steps:
      tokens: published ids; one that ends the request is the last of them.
      text: their text, except what may yet be half a character or the beginning of a stop
        string; None without a tokenizer.
      rounds: counts of each round.
      restored: positions that came with a checkpoint; prefilled: prompt tokens that ran through
        the target after them.
      turn: its last turn checkpoint, as long as that is kept.
      finish_reason: None while running; "stop" | "length" | "cancelled" | "error".
      error: what was raised, where the reason is "error".

    Raises:
      ValueError: names the field, its value and what was expected.
    """

    prompt: list[int]
    sampling: Sampling = Sampling()
    seed: int | None = None
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    eos_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    suffix_tokens: int = 0
    on_text: Callable[[str], None] | None = None
    draft_tokens: int = dataclasses.field(default=0, init=False)
    block_attention: str | None = dataclasses.field(default=None, init=False)
    origin: "Checkpoint | None" = dataclasses.field(default=None, init=False)
    turn: "weakref.ref[Checkpoint] | None" = dataclasses.field(default=None, init=False)
    tokens: list[int] = dataclasses.field(default_factory=list, init=False)
    text: str | None = dataclasses.field(default=None, init=False)
    rounds: list[Round] = dataclasses.field(default_factory=list, init=False)
    restored: int = dataclasses.field(default=0, init=False)
    prefilled: int = dataclasses.field(default=0, init=False)
    finish_reason: str | None = dataclasses.field(default=None, init=False)
    error: Exception | None = dataclasses.field(default=None, init=False)

    def __post_init__(self):
        self.stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        self.eos_ids = tuple(self.eos_ids)
        if not self.prompt:
            raise ValueError(f"prompt: got {self.prompt!r}, expected at least one token")
        _check("sampling", self.sampling, isinstance(self.sampling, Sampling), "a Sampling")
        _check_whole("max_new_tokens", self.max_new_tokens, 1, math.inf)
        _check_whole("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens)
        if self.seed is None:
            self.seed = next(_unseeded) % SEEDS
        _check_whole("seed", self.seed, 0, SEEDS - 1)
        for text in self.stop:
            _check("stop", text, isinstance(text, str) and text, "non-empty strings")
        for token in self.eos_ids:
            _check_whole("eos_ids", token, 0, math.inf)
        _check_whole("suffix_tokens", self.suffix_tokens, 0, len(self.prompt) - 1)
        _check("ignore_eos", self.ignore_eos, isinstance(self.ignore_eos, bool), "True or False")
        valid = self.on_text is None or callable(self.on_text)
        _check("on_text", self.on_text, valid, "a function of a string, or None")

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end this request."""
        return () if self.ignore_eos else self.eos_ids

    @property
    def statistics(self) -> Statistics:
        """What the rounds so far add up to."""
        sums = {
            name: sum(getattr(r, name) for r in self.rounds)
            for name in ("proposed", "verified", "accepted", "committed")
        }
        return Statistics(
            rounds=len(self.rounds),
            **sums,
            acceptance_length=acceptance_length(self.rounds),
            accepted_per_position=accepted_per_position(self.rounds, self.draft_tokens),
        )

    def __repr__(self):
        return (
            f"Request({len(self.prompt)} prompt tokens, {len(self.tokens)} of at most "
            f"{self.max_new_tokens} new ones, {self.finish_reason or 'running'})"
        )


def _check(name, value, valid, expected) -> None:
    if not valid:
        raise ValueError(f"{name}: got {value!r}, expected {expected}")


def _check_whole(name, value, low, high) -> None:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    expected = (
        f"a whole number >= {low}" if high == math.inf else f"a whole number in {low}..{high}"
    )
    _check(name, value, whole and low <= value <= high, expected)
