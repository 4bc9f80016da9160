"""candidate_selector against a float64 walk, hand cases and the law it must draw from."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.candidate_selector import candidate_selector, pallas

# Energies are float32 sums of up to 256 products; their absolute error, some 1e-6 for the sizes
# here, is the relative error of q.
LAW = dict(rtol=3e-5, atol=1e-6)
JUST_BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))


def energies(scores, candidates, projected, predecessor, successor, token, column):
    gated = np.float64(predecessor[token]) * np.float64(projected[column])
    return np.float64(scores[column]) + np.float64(successor[candidates[column]]) @ gated


def oracle(scores, candidates, projected, predecessor, successor, anchor, temperature, uniforms):
    """Float64 walk. Also returns how near a decision came to falling the other way."""
    rows, columns, ranks = scores.shape
    choices, laws = np.zeros((rows, columns), int), np.zeros(scores.shape)
    margin = np.inf
    for b in range(rows):
        token = anchor[b]
        for i in range(columns):
            energy = energies(
                scores[b], candidates[b], projected[b], predecessor, successor, token, i
            )
            if temperature[b] <= 0:
                choices[b, i] = int(np.argmax(energy))
                laws[b, i, choices[b, i]] = 1
                ordered = np.sort(energy)
                margin = min(margin, ordered[-1] - ordered[-2])
            else:
                weights = np.exp((energy - energy.max()) / temperature[b])
                laws[b, i] = weights / weights.sum()
                cumulative = np.cumsum(laws[b, i])
                choices[b, i] = next(j for j in range(ranks) if cumulative[j] > uniforms[b, i])
                margin = min(margin, np.abs(cumulative[:-1] - uniforms[b, i]).min())
            token = candidates[b, i, choices[b, i]]
    tokens = np.take_along_axis(candidates, choices[..., None], axis=2)[..., 0]
    return tokens, choices, laws, margin


def inputs(rng, rows, columns, ranks, rank, temperature, vocabulary=64, dtype=np.float32):
    candidates = np.stack(
        [
            [rng.choice(vocabulary, ranks, replace=False) for _ in range(columns)]
            for _ in range(rows)
        ]
    ).astype(np.int32)
    # Unary scores of both signs, in descending order, and a pair term of about their size.
    scores = -np.sort(-rng.normal(size=(rows, columns, ranks))).astype(np.float32)
    projected = rng.normal(size=(rows, columns, rank)) / np.sqrt(rank)
    predecessor, successor = rng.normal(size=(2, vocabulary, rank))
    projected, predecessor, successor = (
        np.asarray(x, dtype) for x in (projected, predecessor, successor)
    )
    anchor = rng.integers(vocabulary, size=rows).astype(np.int32)
    uniforms = rng.uniform(size=(rows, columns)).astype(np.float32)
    temperature = np.broadcast_to(np.float32(temperature), (rows,))
    return (
        scores, candidates, projected, predecessor, successor, anchor, temperature, uniforms
    )  # fmt: skip


def one_column(energy, temperature, uniform):
    """Arguments for one row and column whose energies are the given unary scores.

    Padded to four candidates with scores of -inf, so that all hand cases share one compilation.
    """
    ranks = 4
    energy = [*energy, *[-np.inf] * (ranks - len(energy))]
    return (
        np.float32(energy)[None, None],
        np.arange(10, 10 + ranks, dtype=np.int32)[None, None],
        np.zeros((1, 1, 3), np.float32),
        np.zeros((40, 3), np.float32),
        np.zeros((40, 3), np.float32),
        np.int32([0]),
        np.float32([temperature]),
        np.float32([[uniform]]),
    )


class CandidateSelectorCases:
    """Every backend inherits these; `function` is the op with its implementation bound."""

    function = None
    draws = 20000  # of the test of the law

    def select(self, *args):
        tokens, choices, q = jax.jit(self.function)(*args)
        assert tokens.dtype == choices.dtype == jnp.int32
        assert q.dtype == jnp.float32
        return np.asarray(tokens), np.asarray(choices), np.asarray(q)

    @pytest.mark.parametrize("temperature", [0.0, 0.7, [0.0, 1.3, -1.0, 0.2]])
    @pytest.mark.parametrize(
        "columns, ranks, rank, dtype",
        [
            (1, 4, 8, np.float32),
            (7, 16, 256, jnp.bfloat16),
            (5, 5, 12, np.float32),
            (3, 1, 1, np.float32),
        ],
    )
    def test_equals_the_float64_walk(self, columns, ranks, rank, dtype, temperature):
        args = inputs(np.random.default_rng(0), 4, columns, ranks, rank, temperature, dtype=dtype)
        tokens, choices, law, margin = oracle(*args) if ranks > 1 else self.only_candidate(args)
        assert margin > 1e-5, "the case itself is a near tie: take another seed"
        got_tokens, got_choices, got_law = self.select(*args)
        np.testing.assert_array_equal(got_choices, choices)
        np.testing.assert_array_equal(got_tokens, tokens)
        np.testing.assert_allclose(got_law, law, **LAW)

    def only_candidate(self, args):
        shape = args[0].shape[:2]
        return args[1][..., 0], np.zeros(shape), np.ones((*shape, 1)), np.inf

    def test_hand_case_best_path_is_not_the_argmax_of_each_column(self):
        # Rank 1, gates 1, unary scores (1, 0.9) everywhere: alone they would give 10, 12, 14.
        # From anchor 0: token 11 gains 0.5; after 11, token 12 loses 1; after 13, 15 gains 2.
        # Anchor 1 says nothing: 10; then token 12 gains 1; 12 says nothing: 14.
        predecessor, successor = np.zeros((2, 20, 1), np.float32)
        predecessor[[0, 10, 11, 13], 0] = [1, 1, -1, 2]
        successor[[11, 12, 15], 0] = [0.5, 1, 1]
        args = (
            np.tile(np.float32([1, 0.9]), (2, 3, 1)),
            np.tile(np.int32([[10, 11], [12, 13], [14, 15]]), (2, 1, 1)),
            np.ones((2, 3, 1), np.float32),
            predecessor,
            successor,
            np.int32([0, 1]),
            np.zeros(2, np.float32),
            np.zeros((2, 3), np.float32),
        )
        tokens, choices, q = self.select(*args)
        np.testing.assert_array_equal(tokens, [[11, 13, 15], [10, 12, 14]])
        np.testing.assert_array_equal(choices, [[1, 1, 1], [0, 0, 0]])
        np.testing.assert_array_equal(q, np.eye(2)[choices])

    @pytest.mark.parametrize("what", ["rank", "candidate"])
    def test_every_rank_and_every_candidate_counts(self, what):
        # Rank dimensions 64..255, or candidates 5..16, are not left out.
        args = list(inputs(np.random.default_rng(1), 1, 2, 16, 256, 1.0))
        *_, q = self.select(*args)
        if what == "rank":
            args[2] = np.where(np.arange(256) >= 64, -args[2], args[2])
        else:
            args[0] = args[0] + np.where(np.arange(16) >= 4, np.float32(0.5), np.float32(0))
        *_, changed = self.select(*args)
        assert np.abs(changed - q).max(axis=-1).min() > 1e-3
        np.testing.assert_allclose(changed, oracle(*args)[2], **LAW)

    @pytest.mark.parametrize(
        "energy, choice",
        [
            ([1, 3, 3, 2], 1),
            ([0, 0, 0], 0),
            ([-5, -2, -2, -7], 1),
            ([-0.0, 0.0], 0),
            ([-np.inf, -4, -np.inf], 1),
        ],
    )
    def test_greedy_ties_take_the_lowest_rank(self, energy, choice):
        for temperature in (0.0, -1.0):
            tokens, choices, q = self.select(*one_column(energy, temperature, 0.99))
            assert choices[0, 0] == choice
            assert tokens[0, 0] == 10 + choice
            np.testing.assert_array_equal(q[0, 0], np.eye(4)[choice])

    @pytest.mark.parametrize(
        "energy, uniform, choice",
        [
            ([0, 0, 0, 0], 0.0, 0),
            ([0, 0, 0, 0], 0.25, 1),  # strictly above: the border belongs to the next one
            ([0, 0, 0, 0], JUST_BELOW_ONE, 3),
            ([-1e4, 0, 0], 0.0, 1),  # no mass: exp() underflows
            ([0, 0, -1e4, -np.inf], JUST_BELOW_ONE, 1),
            ([-np.inf, -1e4, 7, -1e4], 0.0, 2),
            ([-np.inf, -1e4, 7, -1e4], JUST_BELOW_ONE, 2),
        ],
    )
    def test_ends_of_the_uniform_and_candidates_without_mass(self, energy, uniform, choice):
        _, choices, q = self.select(*one_column(energy, 1.0, uniform))
        assert choices[0, 0] == choice
        assert q[0, 0, choice] > 0

    def test_uniform_just_below_one_always_finds_a_candidate_with_mass(self):
        # The float32 sum of 16 masses often stops short of 1; trailing candidates have none.
        rng = np.random.default_rng(2)
        args = list(inputs(rng, 8, 7, 16, 4, 1.0))
        args[0][..., 12:] = -np.inf
        args[7] = np.full((8, 7), JUST_BELOW_ONE)
        _, choices, q = self.select(*args)
        assert (choices <= 11).all()
        assert (np.take_along_axis(q, choices[..., None], axis=2) > 0).all()

    def test_tiny_temperature_is_the_argmax_and_no_nan(self):
        _, choices, q = self.select(*one_column([3, 900, -900, 5], 1e-38, 0.5))
        assert choices[0, 0] == 1
        np.testing.assert_array_equal(q[0, 0], [0, 1, 0, 0])

    def test_paths_follow_their_law(self):
        # Joint frequencies of all 4^3 paths over many uniforms, each within 4 sigma.
        rng = np.random.default_rng(3)
        scores, candidates, projected, predecessor, successor, anchor, _, _ = inputs(
            rng, 1, 3, 4, 6, 0.8
        )
        draws = self.draws
        wide = [np.repeat(x, draws, axis=0) for x in (scores, candidates, projected)]
        _, choices, _ = self.select(
            *wide,
            predecessor,
            successor,
            np.repeat(anchor, draws),
            np.full(draws, 0.8, np.float32),
            rng.uniform(size=(draws, 3)).astype(np.float32),
        )
        for path in itertools.product(range(4), repeat=3):
            token, probability = anchor[0], 1.0
            for i, j in enumerate(path):
                energy = energies(
                    scores[0], candidates[0], projected[0], predecessor, successor, token, i
                )
                weights = np.exp((energy - energy.max()) / 0.8)
                probability *= weights[j] / weights.sum()
                token = candidates[0, i, j]
            frequency = (choices == path).all(axis=1).mean()
            sigma = np.sqrt(probability * (1 - probability) / draws)
            # Half a count more, for paths rarer than a draw.
            assert abs(frequency - probability) < 4 * sigma + 0.5 / draws, path

    def test_rows_do_not_depend_on_each_other(self):
        temperature = [0.0, 0.5, 1.0, 0.0, 2.0, 0.7, 0.0, 1.0]
        args = inputs(np.random.default_rng(4), 8, 7, 16, 32, temperature)
        plain = self.select(*args)
        order = np.array([5, 2, 7, 0, 1, 6, 3, 4])
        permuted = [x if index in (3, 4) else x[order] for index, x in enumerate(args)]
        for got, expected in zip(self.select(*permuted), plain, strict=True):
            np.testing.assert_array_equal(got, expected[order])
        poisoned = list(args)
        poisoned[0] = args[0].copy()
        poisoned[0][3] = np.nan
        others = np.delete(np.arange(8), 3)
        for got, expected in zip(self.select(*poisoned), plain, strict=True):
            np.testing.assert_array_equal(got[others], expected[others])

    def test_one_row_alone_makes_the_same_choices(self):
        args = inputs(np.random.default_rng(5), 8, 7, 16, 32, 0.9)
        _, choices, q = self.select(*args)
        for b in range(2):
            alone = [x if i in (3, 4) else x[b : b + 1] for i, x in enumerate(args)]
            _, one, law = self.select(*alone)
            np.testing.assert_array_equal(one[0], choices[b])
            np.testing.assert_allclose(law[0], q[b], **LAW)


class TestReference(CandidateSelectorCases):
    function = functools.partial(candidate_selector, implementation="reference")


class TestPallas(CandidateSelectorCases):
    function = functools.partial(candidate_selector, implementation="pallas_interpret")
    draws = 2000  # one after the other when interpreted

    def test_lattice_rows(self):
        args = inputs(np.random.default_rng(7), 2, 3, 5, 12, 1.0)
        scores, candidates, projected, predecessor, successor, anchor, *_ = args
        lattice = np.asarray(jax.jit(functools.partial(pallas.lattice, interpret=True))(*args[:6]))
        for b in range(2):
            for i in range(3):
                for p in range(5):
                    token = anchor[b] if i == 0 else candidates[b, i - 1, p]
                    expected = energies(
                        scores[b], candidates[b], projected[b], predecessor, successor, token, i
                    )
                    # Float32 sums of twelve products of numbers near 1.
                    np.testing.assert_allclose(lattice[b, i, p], expected, rtol=1e-5, atol=3e-6)

    def test_an_id_outside_the_codebook_reads_nobodys_row(self):
        args = list(inputs(np.random.default_rng(8), 2, 2, 4, 8, 1.0))
        args[5] = np.array([64, -1], np.int32)
        _, choices, q = self.select(*args)
        assert np.isnan(q[:, 0]).all()
        assert ((0 <= choices) & (choices < 4)).all()


class TestXla(CandidateSelectorCases):
    function = functools.partial(candidate_selector, implementation="xla")


class TestApi:
    def args(self):
        return list(inputs(np.random.default_rng(6), 2, 3, 4, 5, 1.0))

    @pytest.mark.parametrize(
        "name, why",
        [("pallas", "no CUDA device"), ("triton", "no CUDA device"), ("XLA", "expected")],
    )
    def test_named_implementation_is_refused_not_replaced(self, name, why):
        with pytest.raises(ValueError, match=f"{name}.*{why}"):
            candidate_selector(*self.args(), implementation=name)

    @pytest.mark.parametrize(
        "index, name, shape",
        [
            (0, "scores", (2, 3)),
            (1, "candidates", (2, 3, 5)),
            (2, "projected", (2, 4, 5)),
            (3, "predecessor", (64, 4)),
            (4, "successor", (63, 5)),
            (5, "anchor", (2, 1)),
            (6, "temperature", ()),
            (7, "uniforms", (2, 4)),
        ],
    )
    def test_shape_errors_name_the_argument(self, index, name, shape):
        args = self.args()
        args[index] = jnp.zeros(shape)
        with pytest.raises(ValueError, match=rf"{name}: got .*expected"):
            candidate_selector(*args)
