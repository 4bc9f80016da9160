"""The processed target distribution against the reference's laws and a float64 oracle."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoding.distribution import (
    Controls,
    Sampling,
    best_token,
    make_controls,
    process_logits,
    public_logits,
    target_distribution,
)
from dflash_jax.io.tensors import stream_tensors
from dflash_jax.state.counts import TokenCounts, count_output, count_prompt, init_counts
from experiments.target_law import next_token_law

CLOSE = dict(rtol=2e-5, atol=1e-7)


@pytest.fixture(scope="module")
def oracle(fixtures_dir):
    return dict(stream_tensors(fixtures_dir / "sampling.safetensors"))


def controls(*temperatures):
    return make_controls([Sampling(t) for t in temperatures])


@functools.partial(jax.jit, static_argnums=5)
def _law(logits, controls, counts, drafted, position, public_vocab):
    processed = process_logits(logits, controls, counts, drafted, position, public_vocab)
    return target_distribution(processed, controls)


def law_of(logits, controls, public_vocab=None, counts=None, drafted=None, position=None):
    """The law of `[B, W, V]` logits, by default of rows without history."""
    logits = jnp.asarray(logits)
    rows, columns, vocab_size = logits.shape
    return np.asarray(
        _law(
            logits,
            controls,
            counts or init_counts(rows, vocab_size),
            jnp.zeros((rows, columns - 1), jnp.int32) if drafted is None else jnp.asarray(drafted),
            jnp.zeros(rows, jnp.int32) if position is None else jnp.asarray(position),
            vocab_size if public_vocab is None else public_vocab,
        )
    )


def softmax(logits, temperature):
    scaled = np.asarray(logits, np.float64) / temperature
    weights = np.exp(scaled - scaled.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


# --- temperature and the public vocabulary ---


def test_equals_the_reference_without_filters(oracle):
    logits = oracle["samp.logits"]
    cases = [m for m in (re.fullmatch(r"samp\.T([\d.]+)_p1\.0_k0", name) for name in oracle) if m]
    assert cases
    for case in cases:
        law = law_of(logits, controls(*[float(case[1])] * len(logits)))
        np.testing.assert_allclose(law, oracle[case[0]], **CLOSE, err_msg=case[0])


def test_equals_a_float64_softmax_per_row(rng):
    """Rows with their own temperatures, a greedy one among them, over several columns."""
    logits = rng.normal(size=(4, 3, 11)).astype(np.float32) * 3
    temperatures = (0.7, 0.0, 1.0, 2.5)
    law = law_of(logits, controls(*temperatures))
    for row, temperature in enumerate(temperatures):
        if temperature:
            np.testing.assert_allclose(law[row], softmax(logits[row], temperature), **CLOSE)
        else:
            expected = np.eye(11)[logits[row].argmax(-1)]
            np.testing.assert_array_equal(law[row], expected)


def test_greedy_is_the_best_token_and_ties_take_the_lowest_id():
    logits = jnp.array([[1.0, 3.0, 3.0, -1.0], [2.0, 0.0, 2.0, 2.0], [-5.0, -5.0, -5.0, -5.0]])
    np.testing.assert_array_equal(best_token(logits), [1, 0, 0])
    law = law_of(logits[:, None], controls(0.0, 0.0, 0.0))[:, 0]
    np.testing.assert_array_equal(law, np.eye(4)[[1, 0, 0]])


def test_sampled_ties_share_their_mass():
    law = law_of(jnp.array([[[2.0, 2.0, 2.0, 2.0]]]), controls(0.8))
    np.testing.assert_allclose(law, 0.25, rtol=1e-6)


def test_padded_rows_have_no_mass_however_high_they_score(rng):
    logits = rng.normal(size=(3, 2, 8)).astype(np.float32)
    logits[..., 5:] = 50.0
    temperatures = (0.0, 1.0, 5.0)
    law = law_of(logits, controls(*temperatures), 5)
    np.testing.assert_array_equal(law[..., 5:], 0.0)
    np.testing.assert_array_equal(law[0, :, :5], np.eye(5)[logits[0, :, :5].argmax(-1)])
    for row in (1, 2):
        np.testing.assert_allclose(
            law[row, :, :5], softmax(logits[row, :, :5], temperatures[row]), **CLOSE
        )
    assert np.isneginf(public_logits(jnp.asarray(logits), 5)[..., 5:]).all()
    np.testing.assert_array_equal(public_logits(jnp.asarray(logits), 8), logits)


@pytest.mark.parametrize("temperature", [1e-37, 1e-8, 1e-3])
def test_a_tiny_temperature_neither_overflows_nor_leaves_the_best_token(temperature):
    logits = jnp.array([[300.0, 299.0, -300.0, 0.0], [-1e4, 3e4, 2e4, -3e4]])[:, None]
    law = law_of(logits, controls(temperature, temperature))
    np.testing.assert_array_equal(law[:, 0], np.eye(4)[[0, 1]])


def test_a_high_temperature_is_nearly_uniform(rng):
    logits = rng.normal(size=(1, 1, 8)).astype(np.float32)
    law = law_of(logits, controls(1e4))
    np.testing.assert_allclose(law, softmax(logits, 1e4), **CLOSE)
    np.testing.assert_allclose(law, 1 / 8, rtol=1e-3)


def test_mass_sums_to_one(rng):
    logits = rng.normal(size=(3, 5, 50)).astype(np.float32) * 10
    law = law_of(logits, controls(0.0, 0.4, 1.3), 44).astype(np.float64)
    np.testing.assert_allclose(law.sum(-1), 1.0, rtol=2e-6)
    assert law.min() >= 0


# --- filters ---


def test_equals_the_reference_with_filters(oracle):
    """Temperature, top-k and top-p in the reference's grid."""
    logits = oracle["samp.logits"]
    pattern = re.compile(r"samp\.T([\d.]+)_p([\d.]+)_k(\d+)")
    cases = [m for m in map(pattern.fullmatch, oracle) if m and float(m[1]) > 0]
    assert len(cases) > 1
    for case in cases:
        sampling = Sampling(float(case[1]), int(case[3]), float(case[2]))
        law = law_of(logits, make_controls([sampling] * len(logits)))
        np.testing.assert_allclose(law, oracle[case[0]], **CLOSE, err_msg=case[0])


FILTERS = [
    Sampling(1.0, top_k=3),
    Sampling(0.6, top_p=0.7),
    Sampling(1.4, min_p=0.2),
    Sampling(0.9, top_k=5, top_p=0.8, min_p=0.1),
    Sampling(1.0, top_k=1, top_p=0.8),
    Sampling(1.0, top_p=0.0),
    Sampling(1.0, min_p=1.0),
    Sampling(0.0, top_k=2, top_p=0.3),
]


def test_every_column_and_row_is_filtered_by_its_own_controls(rng):
    logits = rng.normal(size=(len(FILTERS), 4, 12)).astype(np.float32) * 2
    law = law_of(logits, make_controls(FILTERS))
    for row, sampling in enumerate(FILTERS):
        for column in range(4):
            expected = next_token_law(logits[row, column], sampling)
            np.testing.assert_allclose(law[row, column], expected, **CLOSE, err_msg=str(sampling))
            np.testing.assert_array_equal(law[row, column] > 0, expected > 0)


def test_filters_that_keep_everything_change_nothing(rng):
    logits = rng.normal(size=(6, 2, 300)).astype(np.float32) * 4
    # The last row turns the filters on; the others must come through them bit for bit.
    off = [
        Sampling(0.8),
        Sampling(0.8, top_k=300),
        Sampling(0.8, top_k=2**40),
        Sampling(0.8, top_p=1.0),
        Sampling(0.8, min_p=0.0),
    ]
    law = law_of(logits, make_controls([*off, Sampling(0.8, top_k=1)]))
    np.testing.assert_array_equal(law[:5], law_of(logits, make_controls([*off, off[0]]))[:5])
    assert (law[:5] > 0).all()


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_top_k_keeps_exactly_k_and_the_lowest_ids_among_equals(top_k):
    logits = jnp.array([[[1.0, 2.0, 2.0, 2.0, 0.0]]])
    law = law_of(logits, make_controls([Sampling(1.0, top_k=top_k)]))[0, 0]
    np.testing.assert_array_equal(np.flatnonzero(law), np.arange(1, top_k + 1))


def test_top_p_keeps_the_token_that_crosses_the_border_and_none_after():
    logits = jnp.log(jnp.array([[[0.5, 0.25, 0.125, 0.125]]]))
    for top_p, kept in ((0.5, 1), (0.500001, 2), (0.75, 2), (0.76, 3), (0.9, 4), (1e-9, 1)):
        law = law_of(logits, make_controls([Sampling(1.0, top_p=top_p)]))[0, 0]
        np.testing.assert_array_equal(np.flatnonzero(law), np.arange(kept), err_msg=str(top_p))


def test_top_p_sees_the_law_that_top_k_left():
    """Of (.5, .25, .125, .125) top-k 2 leaves (2/3, 1/3): two thirds reach a border of .6."""
    logits = jnp.log(jnp.array([[[0.5, 0.25, 0.125, 0.125]]]))
    law = law_of(logits, make_controls([Sampling(1.0, top_k=2, top_p=0.6)]))[0, 0]
    np.testing.assert_allclose(law, [1, 0, 0, 0])


def test_temperature_comes_before_the_filters():
    """(.5, .25, .25) squared is (2/3, 1/6, 1/6): at T = 0.5 a border of .6 leaves one token."""
    logits = jnp.log(jnp.array([[[0.5, 0.25, 0.25]]]))
    for temperature, kept in ((1.0, 2), (0.5, 1)):
        law = law_of(logits, make_controls([Sampling(temperature, top_p=0.6)]))[0, 0]
        assert np.count_nonzero(law) == kept


def test_the_padded_vocabulary_cannot_pass_a_filter(rng):
    logits = rng.normal(size=(1, 2, 9)).astype(np.float32)
    logits[..., 6:] = 50
    law = law_of(logits, make_controls([Sampling(1.0, top_k=8, min_p=1e-9)]), 6)
    np.testing.assert_array_equal(law[..., 6:], 0)
    for column in range(2):
        np.testing.assert_allclose(law[0, column, :6], softmax(logits[0, column, :6], 1), **CLOSE)


# --- penalties ---


def history(prompts, outputs, vocab_size):
    counts = init_counts(len(prompts), vocab_size)
    for add, texts in ((count_prompt, prompts), (count_output, outputs)):
        width = max(map(len, texts))
        padded = np.full((len(texts), width), -1, np.int32)
        for row, text in enumerate(texts):
            padded[row, : len(text)] = text
        counts = add(counts, jnp.asarray(padded), jnp.asarray([len(text) for text in texts]))
    return counts


PENALISED = [
    Sampling(1.0, presence_penalty=1.5),
    Sampling(0.7, frequency_penalty=0.8),
    Sampling(1.2, repetition_penalty=1.7),
    Sampling(0.0, presence_penalty=0.5, frequency_penalty=-0.4, repetition_penalty=0.6),
    Sampling(0.9, 4, 0.8, 0.05, 0.9, 0.4, 1.3),
    Sampling(1.0),
]


def test_every_column_counts_prompt_output_and_the_proposals_before_it(rng):
    rows, columns, vocab_size = len(PENALISED), 5, 7
    logits = rng.normal(size=(rows, columns, vocab_size)).astype(np.float32) * 3
    prompts = [rng.integers(vocab_size, size=n).tolist() for n in (3, 1, 2, 3, 2, 5)]
    outputs = [rng.integers(vocab_size, size=n).tolist() for n in (1, 4, 3, 2, 5, 6)]
    drafted = rng.integers(vocab_size, size=(rows, columns - 1))
    drafted[0] = drafted[0, 0]  # the same token again and again
    counts = history(prompts, outputs, vocab_size)
    law = law_of(logits, make_controls(PENALISED), counts=counts, drafted=drafted)
    for row, sampling in enumerate(PENALISED):
        for column in range(columns):
            seen = outputs[row] + drafted[row, :column].tolist()
            expected = next_token_law(logits[row, column], sampling, prompts[row], seen)
            np.testing.assert_allclose(
                law[row, column], expected, **CLOSE, err_msg=f"{sampling} {column}"
            )


def test_only_repetition_counts_the_prompt():
    logits = np.full((3, 1, 4), 2.0, np.float32)
    counts = history([[1]] * 3, [[]] * 3, 4)
    samplings = [
        Sampling(1.0, presence_penalty=3.0),
        Sampling(1.0, frequency_penalty=3.0),
        Sampling(1.0, repetition_penalty=3.0),
    ]
    law = law_of(logits, make_controls(samplings), counts=counts)
    np.testing.assert_allclose(law[:2], 0.25, rtol=1e-6)
    assert law[2, 0, 1] < 0.1


def test_one_token_after_another_as_in_plain_decoding():
    """Constant logits (5, 4, 0, 0), presence 2, proposals 0 0 0: the block picks 0, then 1."""
    logits = np.tile(np.float32([5, 4, 0, 0]), (1, 4, 1))
    only = make_controls([Sampling(0.0, presence_penalty=2.0)])
    picks = law_of(logits, only, drafted=[[0, 0, 0]]).argmax(-1)[0]
    assert picks[:2].tolist() == [0, 1]
    after = history([[]], [[0, 1]], 4)
    assert law_of(logits, only, counts=after)[0, 0].argmax() == 0


def test_dead_tokens_are_not_counted():
    tokens = jnp.array([[2, -1, 7, 3], [1, 1, -5, 9]])
    counts = count_output(init_counts(2, 5), tokens, jnp.array([2, 3]))
    np.testing.assert_array_equal(counts.output, [[0, 0, 1, 0, 0], [0, 2, 0, 0, 0]])
    assert not counts.prompt.any()
    counts = count_prompt(counts, tokens, jnp.array([4, 0]))
    np.testing.assert_array_equal(counts.prompt[0], [False, False, True, True, False])
    assert not counts.prompt[1].any()


# --- stop ids that may not come yet ---


def test_stop_ids_have_no_mass_before_their_position(rng):
    logits = rng.normal(size=(3, 4, 6)).astype(np.float32)
    logits[..., 5] = 40.0
    made = make_controls(
        [Sampling(1.0), Sampling(), Sampling(1.0)], [(5, 2), (5,), ()], [12, 12, 12]
    )
    law = law_of(logits, made, position=[10, 11, 10])
    np.testing.assert_array_equal(law[0, :2][:, [2, 5]], 0)
    assert (law[0, 2:, 5] > 0.9).all() and (law[0, 2:, 2] > 0).all()
    np.testing.assert_array_equal(law[1].argmax(-1) == 5, [False, True, True, True])
    assert (law[2, :, 5] > 0.9).all()
    np.testing.assert_allclose(law[0].sum(-1), 1, rtol=2e-6)


# --- rows and controls ---


def test_a_row_does_not_depend_on_its_neighbours(rng):
    """Whatever they turn on: penalties, filters, sampling."""
    logits = rng.normal(size=(len(PENALISED), 3, 7)).astype(np.float32)
    counts = TokenCounts(
        jnp.asarray(rng.random((len(logits), 7)) < 0.5),
        jnp.asarray(rng.integers(3, size=(len(logits), 7))),
    )
    drafted = rng.integers(7, size=(len(logits), 2))
    together = law_of(logits, make_controls(PENALISED), counts=counts, drafted=drafted)
    for row, sampling in enumerate(PENALISED):
        here = slice(row, row + 1)
        alone = law_of(
            logits[here],
            make_controls([sampling]),
            counts=jax.tree.map(lambda leaf, here=here: leaf[here], counts),
            drafted=drafted[here],
        )
        np.testing.assert_array_equal(together[row], alone[0])


def test_controls_keep_the_order_of_rows():
    samplings = [Sampling(0.5, 1, 0.2, 0.3, 0.4, 0.5, 0.6), Sampling(), Sampling(temperature=2e10)]
    made = make_controls(samplings, [(4, 5), (), (6,)], [3, 0, 1])
    assert isinstance(made, Controls)
    for row, sampling in enumerate(samplings):
        for name in Controls._fields[:7]:
            assert getattr(made, name)[row] == np.float32(getattr(sampling, name)), name
    np.testing.assert_array_equal(made.stop_ids, [[4, 5], [-1, -1], [6, -1]])
    np.testing.assert_array_equal(made.stop_from, [3, 0, 1])
    assert make_controls([Sampling()]).stop_ids.shape == (1, 0)
    assert make_controls([Sampling()], width=3).stop_ids.shape == (1, 3)


REFUSED = [
    *(("temperature", value) for value in (-0.1, math.inf, -math.inf, math.nan)),
    *(("top_k", value) for value in (-1, 1.5, True, math.nan)),
    *(("top_p", value) for value in (-0.1, 1.1, math.nan)),
    *(("min_p", value) for value in (-0.1, 1.1, math.nan)),
    *(("presence_penalty", value) for value in (math.inf, math.nan)),
    *(("frequency_penalty", value) for value in (-math.inf, math.nan)),
    *(("repetition_penalty", value) for value in (0.0, -1.0, math.inf, math.nan)),
]


@pytest.mark.parametrize("name, value", REFUSED)
def test_a_control_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name}: got {value}"):
        Sampling(**{name: value})


def test_greedy_is_the_default():
    assert Sampling() == Sampling(temperature=0.0)
