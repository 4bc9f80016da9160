"""The law of whole emitted sequences, by enumeration through the functions that decode.

Nothing here knows what the law should be. Every path that the draft can propose is proposed,
every accept decision taken both ways, every correction and bonus weighed; how likely a decision
is follows from the decision itself, as the measure of the uniforms that lead to it, not from the
probabilities that the code under test retains.
"""

import functools
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
from dflash_jax.decoding.loop import decode
from dflash_jax.decoding.propose import Lattice
from dflash_jax.decoding.spec import Spec, Weights
from dflash_jax.state.counts import count_output
from dflash_jax.state.sequence import SequenceState, init_sequences
from dflash_jax.typing import Array, Float, Int

_PAGE = 16  # positions; a toy's prompt and text fill one
_BISECTIONS = 24  # float32 uniforms are multiples of 2**-23


class Subject(NamedTuple):
    """A pair and a prompt; small enough to enumerate where laws are exact."""

    spec: Spec
    weights: Weights
    prompt: tuple[int, ...]


_prefill = jax.jit(phases.prefill, static_argnums=0)
_select_anchor = jax.jit(phases.select_anchor, static_argnums=0)
_catch_up = jax.jit(phases.catch_up, static_argnums=0)
_commit = jax.jit(phases.commit)


@functools.partial(jax.jit, static_argnums=0)
def _verify(spec, weights, state, tokens, count):
    """Of a proposal verify reads no more than this: one program serves those of any form."""
    return phases.verify(spec, weights, state, acceptance.point_mass(tokens, count))


def _start(
    subject: Subject, sampling: Sampling, rows: int, length: int
) -> tuple[SequenceState, Controls]:
    """`rows` copies of the prompt, processed, with room for `length` tokens; no anchor yet.

    The prompt is one chunk of its own width: thousands of copies of a few tokens, padded as
    generations pad theirs, would cost more than all that follows.
    """
    spec, tokens = subject.spec, jnp.asarray(subject.prompt, jnp.int32)
    controls = make_controls([sampling] * rows)
    state = init_sequences(
        spec.target, spec.draft, jnp.zeros(rows, jnp.uint32), len(tokens) + length, spec.width,
        spec.dtype, page_size=_PAGE, context_dtype=spec.context_dtype,
    )  # fmt: skip
    count = jnp.full(rows, len(tokens))
    state = _prefill(spec, subject.weights, state, jnp.tile(tokens, (rows, 1)), count)
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

        def first(weights, state, controls):
            processed = phases.anchor_logits(subject.spec, weights, state, controls)
            return distribution.target_distribution(processed, controls)

        self._law = jax.jit(law)
        self._first = jax.jit(first)
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
        state, controls = _start(self.subject, sampling, rows, length)
        first = self._first(self.subject.weights, state, controls)
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
        for column in range(1, prefixes.shape[1]):
            state = _catch_up(spec, weights, state)
            verified = _verify(spec, weights, state, drafted, 0 * ones)
            tokens = np.full((rows, spec.width), -1, np.int32)
            tokens[:, 0] = prefixes[:, column]
            state = _commit(state, verified, Accepted(jnp.asarray(tokens), 0 * ones), ones)
        return _catch_up(spec, weights, state)

    def _round(self, state, controls, planned: int, level: int, reached: list) -> None:
        """Adds to `reached` what one round from every prefix of `level` tokens leads to."""
        vocabulary = self.subject.spec.public_vocab
        prefixes = vocabulary**level
        for proposal, weight in self._proposals(state, controls, planned):
            verified = _verify(
                self.subject.spec, self.subject.weights, state, proposal.tokens, proposal.count
            )
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
    subject: Subject,
    sampling: Sampling,
    length: int,
    seeds: Sequence[int],
    rows: int | None = None,
) -> np.ndarray:
    """`[N, length]` tokens of whole generations, one per seed, by the compiled loop itself.

    Args:
      rows: how many run together (all, by default); it divides the number of seeds. The prompt is
        processed once for all of them, since no seed enters before the first choice.
    """
    spec, weights, rows = subject.spec, subject.weights, rows or len(seeds)
    start, controls = _start(subject, sampling, rows, length)
    budget = jnp.full(rows, length, jnp.int32)
    tokens = []
    for part in np.asarray(seeds, np.uint32).reshape(-1, rows):
        state = start._replace(seed=jnp.asarray(part))
        # `decode` consumes its state.
        state = jax.tree.map(jnp.copy, _select_anchor(spec, weights, state, controls))
        _, progress = decode(spec, length, weights, state, controls, budget)
        tokens.append(np.asarray(progress.tokens))
    return np.concatenate(tokens)
