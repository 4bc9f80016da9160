"""Acceptance against the reference's cases, hand cases, and the law of what comes out."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoding import randomness
from dflash_jax.decoding.acceptance import (
    Proposal,
    accept,
    accepted_prefix,
    extra_law,
    point_mass,
    residual,
)
from dflash_jax.decoding.distribution import Sampling, make_controls, target_distribution
from dflash_jax.decoding.randomness import Purpose
from dflash_jax.io.tensors import stream_tensors
from dflash_jax.state.counts import count_output, count_prompt, init_counts
from experiments.target_law import next_token_law
from pallas_kernels.candidate_selector import candidate_selector

TRIALS = 131_072
SIGMAS = 4.0


# --- the reference's cases -------------------------------------------------------------------


class Cases(NamedTuple):
    """All cases of one form as rows of a batch."""

    law: np.ndarray
    proposal: Proposal
    uniforms: np.ndarray
    accepted: np.ndarray
    expected: np.ndarray


@pytest.fixture(scope="module", params=["rej", "rej2"])
def cases(request, fixtures_dir):
    form = request.param
    oracle = dict(stream_tensors(fixtures_dir / "sampling.safetensors"))
    names = [name.removesuffix(".u") for name in oracle if name.endswith(".u")]
    names = [name for name in names if name.split(".")[0] == form]
    assert len(names) >= 20

    def gather(field):
        return np.concatenate([oracle[f"{name}.{field}"] for name in names])

    q = oracle[f"{form}.draft_probs"]
    if form == "rej2":
        candidates = oracle["rej2.indices"]
    else:
        candidates = np.broadcast_to(np.arange(q.shape[-1]), q.shape)
    tokens = gather("tokens").astype(np.int32)
    rows, columns = tokens.shape

    def repeat(x):
        return jnp.asarray(np.repeat(x, rows, axis=0))

    return Cases(
        law=repeat(oracle["rej.target_probs"]),
        proposal=Proposal(
            jnp.asarray(tokens),
            repeat(candidates.astype(np.int32)),
            repeat(q),
            jnp.full(rows, columns),
        ),
        uniforms=jnp.asarray(gather("u")),
        accepted=np.array([int(oracle[f"{name}.accepted"]) for name in names]),
        expected=gather("resample_dist"),
    )


def test_accepts_what_the_reference_accepts(cases):
    accepted = accepted_prefix(cases.law, cases.proposal, cases.uniforms)
    np.testing.assert_array_equal(accepted, cases.accepted)
    assert len(set(cases.accepted.tolist())) > 2  # the cases do reject at different places


def test_next_token_law_equals_the_reference(cases):
    law = extra_law(cases.law, cases.proposal, jnp.asarray(cases.accepted, jnp.int32))
    np.testing.assert_allclose(law, cases.expected, rtol=2e-5, atol=2e-7)


def test_order_of_candidates_does_not_matter(cases):
    order = np.random.default_rng(1).permutation(cases.proposal.q.shape[-1])
    shuffled = cases.proposal._replace(
        candidates=cases.proposal.candidates[..., order], q=cases.proposal.q[..., order]
    )
    np.testing.assert_array_equal(
        accepted_prefix(cases.law, shuffled, cases.uniforms), cases.accepted
    )
    law = extra_law(cases.law, shuffled, jnp.asarray(cases.accepted, jnp.int32))
    np.testing.assert_allclose(law, cases.expected, rtol=2e-5, atol=2e-7)


# --- hand cases ------------------------------------------------------------------------------


def laws(*columns):
    return jnp.asarray([columns], jnp.float32)


def with_q(tokens, *columns):
    """One row; a column is {token: mass}."""
    ids = [list(column) for column in columns]
    masses = [list(column.values()) for column in columns]
    return Proposal(
        jnp.array([tokens]), jnp.array([ids]), jnp.asarray([masses], jnp.float32),
        jnp.array([len(tokens)]),
    )  # fmt: skip


def test_the_ratio_test_is_strict_and_uses_q():
    """p / q = 0.6 / 0.8: uniforms below 0.75 pass, 0.75 itself does not."""
    law = laws([0.6, 0.4], [1.0, 0.0])
    proposal = with_q([0], {0: 0.8, 1: 0.2})
    for u, accepted in ((0.0, 1), (0.7499, 1), (0.7501, 0), (0.9999, 0)):
        assert accepted_prefix(law, proposal, jnp.array([[u]]))[0] == accepted, u
    # An exact border: p = q / 2.
    law, proposal = laws([0.5, 0.5], [1.0, 0.0]), with_q([0], {0: 1.0, 1: 0.0})
    assert accepted_prefix(law, proposal, jnp.array([[0.5]]))[0] == 0


def test_p_above_q_is_always_accepted():
    law, proposal = laws([0.6, 0.4], [1.0, 0.0]), with_q([0], {0: 0.3, 1: 0.7})
    almost_one = np.nextafter(np.float32(1), np.float32(0))
    assert accepted_prefix(law, proposal, jnp.array([[almost_one]]))[0] == 1


def test_a_token_outside_the_support_is_rejected_even_by_a_uniform_of_zero():
    law = laws([0.5, 0.5, 0.0], [1.0, 0.0, 0.0])
    for proposal in (with_q([2], {2: 1.0}), with_q([2], {2: 0.9, 0: 0.1})):
        assert accepted_prefix(law, proposal, jnp.zeros((1, 1)))[0] == 0
    # One-hot on a token of no mass: the residual is p.
    left = extra_law(law, with_q([2], {2: 1.0}), jnp.array([0]))
    np.testing.assert_array_equal(left[0], [0.5, 0.5, 0.0])


def test_only_the_leading_run_counts():
    law = laws(*[[0.5, 0.5]] * 5)
    proposal = with_q([0, 0, 0, 0], *[{0: 1.0}] * 4)
    u = jnp.array([[0.1, 0.9, 0.1, 0.1]])
    assert accepted_prefix(law, proposal, u)[0] == 1
    assert accepted_prefix(law, proposal, u.at[0, 1].set(0.2))[0] == 4


def test_columns_beyond_the_count_are_not_read():
    """Their tokens, q and laws are NaN or nonsense; the token after them is the bonus."""
    law = laws([0.5, 0.5], [0.25, 0.75], [np.nan, np.nan], [np.nan, np.nan])
    proposal = with_q([0, 1, 1], {0: 1.0}, {1: np.nan}, {1: np.nan})._replace(count=jnp.array([1]))
    u = jnp.array([[0.1, 0.0, 0.0]])
    accepted = accepted_prefix(law, proposal, u)
    assert accepted[0] == 1
    np.testing.assert_array_equal(extra_law(law, proposal, accepted)[0], [0.25, 0.75])
    # Rejected before them: the residual.
    accepted = accepted_prefix(law, proposal, jnp.array([[0.6, 0.0, 0.0]]))
    assert accepted[0] == 0
    np.testing.assert_array_equal(extra_law(law, proposal, accepted)[0], [0.0, 1.0])


def test_all_accepted_leaves_the_bonus_law_untouched():
    law = laws([0.5, 0.5, 0.0], [0.2, 0.3, 0.5], [0.7, 0.2, 0.1])
    proposal = with_q([0, 2], {0: 0.6, 1: 0.4}, {2: 0.9, 1: 0.1})
    bonus = extra_law(law, proposal, jnp.array([2]))
    np.testing.assert_array_equal(bonus[0], law[0, 2])


def test_residual_by_hand():
    law = jnp.array([[0.1, 0.6, 0.3]])
    left = residual(law, jnp.array([[2, 0, 1]]), jnp.array([[0.2, 0.5, 0.3]]))
    np.testing.assert_allclose(left, [[0.0, 0.75, 0.25]], rtol=1e-6)
    # Candidates that are only a part of the vocabulary.
    left = residual(law, jnp.array([[1]]), jnp.array([[1.0]]))
    np.testing.assert_allclose(left, [[0.25, 0.0, 0.75]], rtol=1e-6)


def test_residual_of_no_mass_is_p_itself():
    law = jnp.array([[0.5, 0.5, 0.0], [0.25, 0.75, 0.0]])
    candidates = jnp.array([[0, 1], [1, 2]])
    left = residual(law, candidates, jnp.array([[0.5, 0.5], [1.0, 0.0]]))
    np.testing.assert_array_equal(left, [[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    covering = residual(law[:1], candidates[:1], jnp.array([[0.75, 0.75]]))
    np.testing.assert_array_equal(covering, law[:1])


# --- accept itself ---------------------------------------------------------------------------

# One shape for all of these, so that they share a compilation. The head has two padded rows,
# which score highest throughout.
ROWS, DRAFT_TOKENS, PUBLIC, PADDED = 8, 4, 7, 9


jitted_accept = jax.jit(accept, static_argnums=6)


def run_accept(logits, proposal, temperature, seed=None, frontier=None):
    rows = len(logits)
    logits = jnp.pad(jnp.asarray(logits), ((0, 0), (0, 0), (0, 2)), constant_values=50.0)
    return jitted_accept(
        logits,
        proposal,
        make_controls([Sampling(float(t)) for t in np.broadcast_to(temperature, rows)]),
        init_counts(rows, logits.shape[-1]),
        jnp.arange(rows, dtype=jnp.uint32) if seed is None else seed,
        jnp.full(rows, 20) if frontier is None else jnp.asarray(frontier),
        logits.shape[-1] - 2,
    )


def two_candidates(tokens, count, first=1.0):
    """Tokens drawn with mass `first`, the rest of it on the token above."""
    tokens = jnp.asarray(tokens, jnp.int32)
    first = jnp.broadcast_to(jnp.asarray(first, jnp.float32), tokens.shape)
    return Proposal(
        tokens,
        jnp.stack([tokens, (tokens + 1) % PUBLIC], axis=-1),
        jnp.stack([first, 1 - first], axis=-1),
        jnp.broadcast_to(jnp.asarray(count), len(tokens)),
    )


@pytest.fixture
def logits(rng):
    return rng.normal(size=(ROWS, DRAFT_TOKENS + 1, PUBLIC)).astype(np.float32)


def test_greedy_takes_the_matching_prefix_and_the_correction():
    """Best tokens 3 1 4 1 5; rows match 0 to 4 of them, the last three with other counts."""
    best = np.array([3, 1, 4, 1, 5])
    tokens = np.tile(best[:4], (ROWS, 1))
    for row in range(4):
        tokens[row, row] = 0
    proposal = two_candidates(tokens, [4, 4, 4, 4, 4, 2, 1, 0])
    expected = np.array(
        [
            [3, -1, -1, -1, -1],
            [3, 1, -1, -1, -1],
            [3, 1, 4, -1, -1],
            [3, 1, 4, 1, -1],
            [3, 1, 4, 1, 5],
            [3, 1, 4, -1, -1],
            [3, 1, -1, -1, -1],
            [3, -1, -1, -1, -1],
        ]
    )
    logits = np.tile(np.eye(PUBLIC, dtype=np.float32)[best], (ROWS, 1, 1))
    # The sampled path at a tiny temperature must agree with the greedy one.
    for temperature in (0.0, 1e-3):
        result = run_accept(logits, proposal, temperature)
        np.testing.assert_array_equal(result.accepted, [0, 1, 2, 3, 4, 2, 1, 0])
        np.testing.assert_array_equal(result.licensed, [1, 2, 3, 4, 5, 3, 2, 1])
        np.testing.assert_array_equal(result.tokens, expected)


def test_a_greedy_row_stays_greedy_beside_sampled_ones(logits):
    """The batch takes the sampled path as soon as one row is sampled."""
    best = logits.argmax(-1)
    tokens = best[:, :4].copy()
    for row, column in ((1, 2), (3, 0), (6, 3)):
        tokens[row, column] = (tokens[row, column] + 1) % PUBLIC
    proposal = two_candidates(tokens, 4)
    alone = run_accept(logits, proposal, 0.0)
    np.testing.assert_array_equal(alone.accepted, [4, 2, 4, 0, 4, 4, 3, 4])
    mixed = run_accept(logits, proposal, [0, 0, 1, 0, 0, 1, 0, 0])
    for row in (0, 1, 3, 4, 6, 7):
        np.testing.assert_array_equal(mixed.tokens[row], alone.tokens[row])


def test_no_proposals_is_a_plain_step(logits):
    proposal = two_candidates(logits.argmax(-1)[:, :4], 0)
    greedy = run_accept(logits, proposal, 0.0)
    np.testing.assert_array_equal(greedy.accepted, 0)
    np.testing.assert_array_equal(greedy.tokens[:, 0], logits[:, 0].argmax(-1))
    np.testing.assert_array_equal(greedy.tokens[:, 1:], -1)
    # Sampled: the same draw as plain decoding, whose block has no proposal column at all.
    sampled = run_accept(logits, proposal, 1.0)
    none = point_mass(jnp.zeros((ROWS, 0), jnp.int32), jnp.zeros(ROWS, jnp.int32))
    plain = run_accept(logits[:, :1], none, 1.0)
    np.testing.assert_array_equal(sampled.tokens[:, :1], plain.tokens)


def test_draws_are_named_by_position_and_purpose(rng, logits):
    """The extra token's own position, with the purpose of what happened before it."""
    count = np.array([4, 4, 4, 3, 2, 1, 0, 0])
    tokens = rng.integers(PUBLIC, size=(ROWS, DRAFT_TOKENS))
    proposal = two_candidates(tokens, count, rng.uniform(0.1, 0.9, size=tokens.shape))
    seed = jnp.asarray(rng.integers(2**32, size=ROWS, dtype=np.uint32))
    law = target_distribution(jnp.asarray(logits), make_controls([Sampling(0.9)] * ROWS))
    seen = set()
    for frontier in range(3, 30, 3):
        start = jnp.full(ROWS, frontier)
        uniforms = randomness.uniforms(seed, start + 1, DRAFT_TOKENS, Purpose.ACCEPT)
        accepted = accepted_prefix(law, proposal, uniforms)
        purpose = np.where(accepted < count, Purpose.CORRECTION, Purpose.BONUS)
        purpose = np.where(count == 0, Purpose.TARGET, purpose)
        extra = randomness.draw_tokens(
            extra_law(law, proposal, accepted), seed, start + accepted + 1, jnp.asarray(purpose)
        )
        result = run_accept(logits, proposal, 0.9, seed, start)
        np.testing.assert_array_equal(result.accepted, accepted)
        last = jnp.take_along_axis(result.tokens, result.accepted[:, None], axis=1)[:, 0]
        np.testing.assert_array_equal(last, extra)
        seen |= set(purpose.tolist())
    assert seen == {Purpose.TARGET, Purpose.CORRECTION, Purpose.BONUS}


def test_padded_ids_are_neither_accepted_nor_emitted():
    """They hold the highest logits, and the proposals."""
    logits = np.zeros((ROWS, DRAFT_TOKENS + 1, PUBLIC), np.float32)
    proposal = two_candidates(np.full((ROWS, DRAFT_TOKENS), PUBLIC), 4)
    seen = set()
    for step in range(8):
        result = run_accept(logits, proposal, 1.0, frontier=np.full(ROWS, step))
        np.testing.assert_array_equal(result.accepted, 0)
        seen |= set(np.asarray(result.tokens[:, 0]).tolist())
    assert seen == set(range(PUBLIC))
    greedy = run_accept(logits, proposal, 0.0)
    np.testing.assert_array_equal(greedy.tokens, [[0, -1, -1, -1, -1]] * ROWS)


PENALISED = [
    Sampling(presence_penalty=2.0),
    Sampling(frequency_penalty=0.7),
    Sampling(repetition_penalty=1.6),
    Sampling(presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.2),
]


@pytest.mark.parametrize("guess", ["always the best of no history", "what plain decoding emits"])
def test_penalties_inside_a_block_are_those_of_plain_decoding(guess):
    """Constant logits (5, 4, 0, 0): rounds emit what single steps emit, and count it once.

    With presence 2 and proposals 0 0 0 the first block gives 0 (accepted) and 1 (correction).
    Rejected proposals leave no trace in the counts.
    """
    rows, tokens, logits = len(PENALISED), 12, np.float32([5, 4, 0, 0])
    prompt = [1, 2]
    plain = [[] for _ in PENALISED]
    for output, sampling in zip(plain, PENALISED, strict=True):
        while len(output) < tokens + 3:
            output.append(int(next_token_law(logits, sampling, prompt, output).argmax()))
    assert plain[0][:3] == [0, 1, 0]

    counts = count_prompt(
        init_counts(rows, 4), jnp.tile(jnp.array(prompt), (rows, 1)), jnp.full(rows, 2)
    )
    controls, made = make_controls(PENALISED), [[] for _ in PENALISED]
    lengths = set()
    while min(map(len, made)) < tokens:
        drafted = np.zeros((rows, 3), np.int32)
        if guess.startswith("what"):
            for row, output in enumerate(made):
                ahead = plain[row][len(output) :][:3]
                drafted[row, : len(ahead)] = ahead
        result = jitted_accept(
            jnp.tile(logits, (rows, 4, 1)),
            point_mass(jnp.asarray(drafted), jnp.full(rows, 3)),
            controls,
            counts,
            jnp.zeros(rows, jnp.uint32),
            jnp.asarray([2 + len(output) for output in made]),
            4,
        )
        counts = count_output(counts, result.tokens, result.licensed)
        for output, licensed, row in zip(made, result.licensed, result.tokens, strict=True):
            output += np.asarray(row)[:licensed].tolist()
            lengths.add(int(licensed))
        for row, output in enumerate(made):
            np.testing.assert_array_equal(counts.output[row], np.bincount(output, minlength=4))
    for output, expected in zip(made, plain, strict=True):
        assert output[:tokens] == expected[:tokens]
    assert len(lengths) > 1 or guess.startswith("what")


def test_a_row_is_the_same_alone_and_in_any_place(rng, logits):
    proposal = two_candidates(
        rng.integers(PUBLIC, size=(ROWS, DRAFT_TOKENS)),
        [4, 3, 2, 1, 0, 4, 4, 4],
        rng.uniform(0.1, 0.9, size=(ROWS, DRAFT_TOKENS)),
    )
    seed = jnp.asarray(rng.integers(2**32, size=ROWS, dtype=np.uint32))
    frontier = jnp.asarray(rng.integers(100, size=ROWS), jnp.int32)

    def rows(index):
        part = jax.tree.map(lambda x: x[index], proposal)
        return run_accept(logits[index], part, 0.9, seed[index], frontier[index])

    together = rows(np.arange(ROWS))
    assert len(set(np.asarray(together.accepted).tolist())) > 1
    order = rng.permutation(ROWS)
    np.testing.assert_array_equal(rows(order).tokens, together.tokens[order])
    for row in range(ROWS):
        np.testing.assert_array_equal(rows(np.array([row])).tokens[0], together.tokens[row])


# --- the law of what is emitted --------------------------------------------------------------


def worst_deviation(tokens, law):
    """Largest |frequency - mass| in standard deviations; infinite if an impossible id came."""
    tokens = np.asarray(tokens)
    law = np.asarray(law, np.float64)
    frequency = np.bincount(tokens, minlength=len(law)) / len(tokens)
    if frequency[law == 0].any():
        return np.inf
    some = law > 0
    sigma = np.sqrt(law[some] * (1 - law[some]) / len(tokens))
    return np.max(np.abs(frequency - law)[some] / np.maximum(sigma, 1e-12))


# A target and a draft that depend on the token before: rows of a stochastic matrix. In the first
# row a proposal of the draft passes 60 times of 100.
TARGET = np.array([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3], [0.35, 0.0, 0.65]])
DRAFT = np.array([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.3, 0.3, 0.4]])
GUESS = np.array([1, 0, 2])  # what DFlash proposes after each token
ANCHOR, START, COLUMNS = 0, 20, 7


def log(law):
    return jnp.asarray(np.log(np.maximum(law, 1e-38)), jnp.float32)


def propose_dflash2(seed, frontier, anchor, purpose=Purpose.PROPOSAL):
    """The real selector; the pair term of its codebooks is the log of `DRAFT`."""
    rows = seed.shape[0]
    shape = (rows, COLUMNS, 3)
    candidates = jnp.broadcast_to(jnp.array([2, 0, 1]), shape)
    tokens, _, q = candidate_selector(
        jnp.zeros(shape),
        candidates,
        jnp.ones(shape),
        log(DRAFT),
        jnp.eye(3),
        anchor,
        jnp.ones(rows),
        randomness.uniforms(seed, frontier + 1, COLUMNS, purpose),
    )
    return Proposal(tokens, candidates, q, jnp.full(rows, COLUMNS))


def propose_dflash(seed, frontier, anchor):
    """A point mass on the guess after the token before."""
    tokens = [jnp.asarray(GUESS)[anchor]]
    while len(tokens) < COLUMNS:
        tokens.append(jnp.asarray(GUESS)[tokens[-1]])
    return point_mass(jnp.stack(tokens, axis=1).astype(jnp.int32), jnp.full(len(seed), COLUMNS))


def share_numbers(seed, frontier, anchor):
    """Wrong: the walk and the acceptance test use the same uniforms."""
    return propose_dflash2(seed, frontier, anchor, Purpose.ACCEPT)


def forget_the_predecessor(seed, frontier, anchor):
    """Wrong: every column claims the law of the first."""
    proposal = propose_dflash2(seed, frontier, anchor)
    return proposal._replace(q=jnp.broadcast_to(proposal.q[:, :1], proposal.q.shape))


@partial(jax.jit, static_argnums=0)
def one_round(propose, seed, frontier, anchor):
    proposal = propose(seed, frontier, anchor)
    before = jnp.concatenate([anchor[:, None], proposal.tokens], axis=1)
    return run_accept(log(TARGET)[before], proposal, 1.0, seed, frontier)


def emit(propose, positions):
    """The first `positions` tokens after the anchor in TRIALS sequences, by whole rounds."""
    seed = jnp.arange(TRIALS, dtype=jnp.uint32)
    frontier, anchor = np.full(TRIALS, START), np.full(TRIALS, ANCHOR, np.int32)
    out = np.full((TRIALS, positions + COLUMNS + 1), -1)
    rows = np.arange(TRIALS)
    while np.any(frontier < START + positions):
        result = jax.device_get(one_round(propose, seed, jnp.asarray(frontier), anchor))
        at = np.minimum(frontier - START, positions)
        for column in range(COLUMNS + 1):
            licensed = column <= result.accepted
            out[rows[licensed], at[licensed] + column] = result.tokens[licensed, column]
        anchor = result.tokens[rows, result.accepted]
        frontier = frontier + result.accepted + 1
    return out[:, :positions]


def chain_deviation(tokens):
    """Worst deviation of any marginal, and of any pair of neighbours, from the target's chain."""
    worst, marginal = 0.0, np.eye(3)[ANCHOR]
    before = np.full(len(tokens), ANCHOR)
    for column in tokens.T:
        pairs = marginal[:, None] * TARGET
        worst = max(worst, worst_deviation(3 * before + column, pairs.ravel()))
        marginal = marginal @ TARGET
        worst = max(worst, worst_deviation(column, marginal))
        before = column
    return worst


@pytest.mark.parametrize("propose", [propose_dflash, propose_dflash2])
def test_emitted_sequences_follow_the_target(propose):
    """Every one of the first seven positions, whatever mix of draft and correction filled it."""
    assert chain_deviation(emit(propose, 7)) < SIGMAS


@pytest.mark.parametrize("propose", [propose_dflash, propose_dflash2])
def test_emitted_tokens_follow_the_target_at_every_depth(propose):
    """One round: given that i proposals passed, token i + 1 obeys the target's law after them."""
    rows = np.arange(TRIALS)
    seed = jnp.asarray(rows + 10**6, jnp.uint32)
    result = jax.device_get(
        one_round(propose, seed, jnp.full(TRIALS, START), jnp.full(TRIALS, ANCHOR, jnp.int32))
    )
    checks = 0
    for depth in range(COLUMNS + 1):
        reached = result.accepted >= depth
        before = result.tokens[:, depth - 1] if depth else np.full(TRIALS, ANCHOR)
        for token in range(3):
            here = reached & (before == token)
            if here.sum() > 500:
                checks += 1
                deviation = worst_deviation(result.tokens[here, depth], TARGET[token])
                assert deviation < SIGMAS, (depth, token, deviation)
    assert checks > COLUMNS


@pytest.mark.parametrize("wrong", [share_numbers, forget_the_predecessor])
def test_wrong_rules_are_seen_by_the_same_check(wrong):
    assert chain_deviation(emit(wrong, 4)) > 3 * SIGMAS


def one_column(token, q, p):
    """TRIALS rows with one proposal under the claimed law q."""
    proposal = Proposal(
        jnp.full((TRIALS, 1), token),
        jnp.broadcast_to(jnp.arange(3), (TRIALS, 1, 3)),
        jnp.broadcast_to(jnp.asarray(q, jnp.float32), (TRIALS, 1, 3)),
        jnp.ones(TRIALS, jnp.int32),
    )
    logits = jnp.broadcast_to(log(p), (TRIALS, 2, len(p)))
    return run_accept(logits, proposal, 1.0)


def test_an_argmax_proposal_is_a_point_mass_and_nothing_else():
    """p = (.5, .5, 0): one-hot on 0 keeps it; the softmax (.9, .1, 0) would give (.556, .444)."""
    p = np.array([0.5, 0.5, 0.0])
    right = one_column(0, [1.0, 0.0, 0.0], p)
    assert worst_deviation(right.tokens[:, 0], p) < SIGMAS
    assert abs(np.mean(right.accepted) - 0.5) < 0.01
    wrong = one_column(0, [0.9, 0.1, 0.0], p)
    assert worst_deviation(wrong.tokens[:, 0], p) > 3 * SIGMAS
    assert worst_deviation(wrong.tokens[:, 0], [5 / 9, 4 / 9, 0.0]) < SIGMAS


def test_a_proposal_without_target_mass_is_always_replaced_by_p():
    p = np.array([0.5, 0.5, 0.0])
    result = one_column(2, [0.0, 0.0, 1.0], p)
    np.testing.assert_array_equal(result.accepted, 0)
    assert worst_deviation(result.tokens[:, 0], p) < SIGMAS


def test_a_draft_equal_to_the_target_is_always_accepted():
    p = np.array([0.25, 0.25, 0.5])
    result = one_column(1, p, p)
    np.testing.assert_array_equal(result.accepted, 1)
    # The bonus is a fresh draw of the same law.
    assert worst_deviation(result.tokens[:, 1], p) < SIGMAS
