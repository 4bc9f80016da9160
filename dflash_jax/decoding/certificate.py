"""The law of whole emitted sequences, by enumeration through the functions that decode.

Nothing here knows what the law should be. Every path that the draft can propose is proposed,
every accept decision taken both ways, every correction and bonus weighed; how likely a decision
is follows from the decision itself, as the measure of the uniforms that lead to it, not from the
probabilities that the code under test retains.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decoding import acceptance, distribution, propose
from dflash_jax.decoding import round as phases
from dflash_jax.decoding.acceptance import Accepted, Proposal
from dflash_jax.decoding.distribution import Controls, Sampling, make_controls
from dflash_jax.decoding.loop import PREFILL_CHUNK, decode, prefill_prompts
from dflash_jax.decoding.propose import Lattice
from dflash_jax.decoding.spec import Spec, Weights
from dflash_jax.state.counts import count_output
from dflash_jax.state.sequence import PAGE_SIZE, SequenceState, init_sequences
from dflash_jax.typing import Array, Float, Int

_BISECTIONS = 24  # float32 uniforms are multiples of 2**-23


class Subject(NamedTuple):
    """A pair and a prompt; small enough to enumerate where laws are exact."""

    spec: Spec
    weights: Weights
    prompt: tuple[int, ...]


_prefill = jax.jit(phases.prefill, static_argnums=0)
_anchor_logits = jax.jit(phases.anchor_logits, static_argnums=0)
_catch_up = jax.jit(phases.catch_up, static_argnums=0)
_verify = jax.jit(phases.verify, static_argnums=0)
_commit = jax.jit(phases.commit)


def _start(subject: Subject, sampling: Sampling, rows: int) -> tuple[SequenceState, Controls]:
    """`rows` copies of the prompt, processed; no anchor yet."""
    spec = subject.spec
    controls = make_controls([sampling] * rows)
    seeds = jnp.zeros(rows, jnp.uint32)
    # One page: a prompt and its sequences are a few tokens.
    state = init_sequences(
        spec.target, spec.draft, seeds, PAGE_SIZE, spec.width, spec.dtype,
        context_dtype=spec.context_dtype,
    )  # fmt: skip
    tokens = jnp.tile(jnp.asarray(subject.prompt, jnp.int32), (rows, 1))
    state = _prefill(spec, subject.weights, state, tokens, jnp.full(rows, len(subject.prompt)))
    return state, controls


def _fresh(function: Callable, **options) -> Callable:
    """Compiled anew: what is certified is what the function and all it calls are now."""

    def call(*args):
        return function(*args)

    return jax.jit(call, **options)


class Enumerator:
    """Exact laws of a small pair; decisions are compiled anew for each enumerator."""

    def __init__(self, subject: Subject):
        self.subject = subject
        vocabulary = subject.spec.public_vocab

        def law(logits, controls, counts, drafted, frontier):
            processed = distribution.process_logits(
                logits, controls, counts, drafted, frontier + 1, vocabulary
            )
            return distribution.target_distribution(processed, controls)

        self._law = jax.jit(law)
        self._extra = _fresh(acceptance.extra_law)
        self._walk = _fresh(propose.walk)
        self._lattice = _fresh(propose.make_lattice, static_argnums=0)
        self._propose = _fresh(propose.propose, static_argnums=0)
        self._passing = _fresh(_passing)
        self._border = _fresh(_border)

    def law(self, sampling: Sampling, length: int) -> np.ndarray:
        """Law of the first `length` published tokens, `[V] * length`, float64.

        Rounds are planned as a generation with that budget plans them, so P takes every value
        from min(K, length - 2) down to 0.
        """
        vocabulary = self.subject.spec.public_vocab
        # All prefixes of a level share one compiled shape.
        rows = vocabulary ** (length - 1)
        state, controls = _start(self.subject, sampling, rows)
        first = distribution.target_distribution(
            _anchor_logits(self.subject.spec, self.subject.weights, state, controls), controls
        )
        reached = [np.zeros(vocabulary**level) for level in range(length + 1)]
        reached[1] += _public(np.asarray(first[0, 0]), vocabulary)
        for level in range(1, length):
            prefixes = np.array(list(itertools.product(range(vocabulary), repeat=level)))
            padded = np.resize(prefixes, (rows, level))
            at = self._after(state, padded)
            planned = min(self.subject.spec.draft_tokens, length - level - 1)
            self._round(at, controls, planned, level, reached)
        return reached[length].reshape((vocabulary,) * length)

    def _after(self, state: SequenceState, prefixes: np.ndarray) -> SequenceState:
        """The state with these tokens published, each committed by a round of its own."""
        spec, weights = self.subject.spec, self.subject.weights
        rows = len(prefixes)
        ones = jnp.ones(rows, jnp.int32)
        anchor = jnp.asarray(prefixes[:, 0], jnp.int32)
        state = state._replace(
            anchor=anchor, counts=count_output(state.counts, anchor[:, None], ones)
        )
        drafted = jnp.zeros((rows, spec.draft_tokens), jnp.int32)
        nothing = acceptance.point_mass(drafted, 0 * ones)
        for column in range(1, prefixes.shape[1]):
            state = _catch_up(spec, weights, state)
            verified = _verify(spec, weights, state, nothing)
            tokens = np.full((rows, spec.width), -1, np.int32)
            tokens[:, 0] = prefixes[:, column]
            state = _commit(state, verified, Accepted(jnp.asarray(tokens), 0 * ones), ones)
        return _catch_up(spec, weights, state)

    def _round(self, state, controls, planned: int, level: int, reached: list) -> None:
        """Adds to `reached` what one round from every prefix of `level` tokens leads to."""
        vocabulary = self.subject.spec.public_vocab
        prefixes = vocabulary**level
        for proposal, weight in self._proposals(state, controls, planned):
            verified = _verify(self.subject.spec, self.subject.weights, state, proposal)
            law = self._law(
                verified.logits, controls, state.counts, proposal.tokens, state.frontier
            )
            passing = [
                np.asarray(self._passing(law, proposal, column), np.float64)
                for column in range(planned)
            ]
            tokens = np.asarray(proposal.tokens)
            index, mass = np.arange(prefixes), reached[level] * weight[:prefixes]
            for accepted in range(planned + 1):
                extra = self._extra(law, proposal, jnp.full(len(tokens), accepted))
                extra = _public(np.asarray(extra), vocabulary)[:prefixes]
                here = mass
                if accepted < planned:
                    chance = passing[accepted][:prefixes]
                    here, mass = mass * (1 - chance), mass * chance
                target = reached[level + accepted + 1].reshape(-1, vocabulary)
                np.add.at(target, index, here[:, None] * extra)
                if accepted < planned:
                    index = index * vocabulary + tokens[:prefixes, accepted]

    def _proposals(self, state, controls, planned: int):
        """Every path the draft can propose, with its chance in each row."""
        spec, weights = self.subject.spec, self.subject.weights
        rows = len(state.frontier)
        count = jnp.full(rows, planned, jnp.int32)
        if spec.draft is None or not spec.draft.dflash2:
            yield self._propose(spec, weights, state, controls, count), np.ones(rows)
            return
        lattice = self._lattice(spec, weights, state)
        yield from self._paths(lattice, state.anchor, controls, count, planned, ())

    def _paths(self, lattice, anchor, controls, count, planned: int, chosen: tuple):
        """Extends the uniforms and chances of a path by each candidate of its next column."""
        rows, columns, candidates = lattice.candidates.shape
        uniforms = np.zeros((rows, columns), np.float32)
        weight = np.ones(rows)
        for column, (uniform, chance) in enumerate(chosen):
            uniforms[:, column] = uniform
            weight = weight * chance

        column = len(chosen)
        if column == planned:
            if weight.any():
                given = (anchor, controls.temperature, jnp.asarray(uniforms), count)
                yield self._walk(lattice, *given), weight
            return
        given = (lattice, anchor, controls.temperature, jnp.asarray(uniforms), count)
        borders = [np.zeros(rows)]
        for rank in range(candidates):
            borders.append(np.asarray(self._border(*given, column, rank), np.float64))
        for low, high in itertools.pairwise(borders):
            step = ((low + high) / 2, high - low)
            if not step[1].any():
                continue
            yield from self._paths(lattice, anchor, controls, count, planned, (*chosen, step))


def _public(law: np.ndarray, vocabulary: int) -> np.ndarray:
    if law[..., vocabulary:].any():
        raise ArithmeticError("a token outside the public vocabulary has mass")
    return law[..., :vocabulary].astype(np.float64)


def _passing(law, proposal: Proposal, column: Int[Array, ""]) -> Float[Array, "B"]:
    """Chance that the proposal of a column passes once those before it have."""

    def passes(uniform):
        uniforms = jnp.zeros(proposal.tokens.shape).at[:, column].set(uniform)
        return acceptance.accepted_prefix(law, proposal, uniforms) > column

    return _measure(passes, len(proposal.tokens))


def _border(
    lattice: Lattice, anchor, temperature, uniforms, count, column, rank
) -> Float[Array, "B"]:
    """Chance that the walk takes one of the ranks 0..rank in a column, given the columns before."""

    def up_to_rank(uniform):
        tried = uniforms.at[:, column].set(uniform)
        tokens = propose.walk(lattice, anchor, temperature, tried, count).tokens[:, column]
        return jnp.argmax(lattice.candidates[:, column] == tokens[:, None], axis=1) <= rank

    return _measure(up_to_rank, len(anchor))


def _measure(holds: Callable[[Array], Array], rows: int) -> Float[Array, "B"]:
    """Per row, the measure of the uniforms for which a decision holds: [0, t) for some t."""

    def halve(_, interval):
        low, high = interval
        middle = (low + high) / 2
        held = holds(middle)
        return jnp.where(held, middle, low), jnp.where(held, high, middle)

    low, high = jax.lax.fori_loop(0, _BISECTIONS, halve, (jnp.zeros(rows), jnp.ones(rows)))
    # Exactly none or all of the interval, where every tried uniform said so.
    return jnp.where(low == 0, 0.0, jnp.where(high == 1, 1.0, (low + high) / 2))


def sampled_sequences(
    subject: Subject, sampling: Sampling, length: int, seeds: Sequence[int]
) -> np.ndarray:
    """`[N, length]` tokens of whole generations, one per seed, by the compiled loop itself."""
    spec, rows = subject.spec, len(seeds)
    controls = make_controls([sampling] * rows)
    padded = -(-len(subject.prompt) // PREFILL_CHUNK) * PREFILL_CHUNK
    prompts = np.zeros((rows, padded), np.int32)
    prompts[:, : len(subject.prompt)] = subject.prompt
    seeds = jnp.asarray(seeds, jnp.uint32)
    capacity = padded + length
    state = init_sequences(
        spec.target, spec.draft, seeds, capacity, spec.width, spec.dtype,
        context_dtype=spec.context_dtype,
    )  # fmt: skip
    lengths = jnp.full(rows, len(subject.prompt), jnp.int32)
    state = prefill_prompts(spec, subject.weights, state, jnp.asarray(prompts), lengths, controls)
    budget = jnp.full(rows, length, jnp.int32)
    _, progress = decode(spec, length, subject.weights, state, controls, budget)
    return np.asarray(progress.tokens)
