"""The processed target distribution against the reference's laws and a float64 softmax."""

import math
import re

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoding.distribution import (
    Controls,
    Sampling,
    best_token,
    make_controls,
    public_logits,
    target_distribution,
)
from dflash_jax.io.tensors import stream_tensors

CLOSE = dict(rtol=2e-5, atol=1e-7)


@pytest.fixture(scope="module")
def oracle(fixtures_dir):
    return dict(stream_tensors(fixtures_dir / "sampling.safetensors"))


def controls(*temperatures):
    return make_controls([Sampling(t) for t in temperatures])


def softmax(logits, temperature):
    scaled = np.asarray(logits, np.float64) / temperature
    weights = np.exp(scaled - scaled.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_equals_the_reference_without_filters(oracle):
    logits = jnp.asarray(oracle["samp.logits"])
    cases = [m for m in (re.fullmatch(r"samp\.T([\d.]+)_p1\.0_k0", name) for name in oracle) if m]
    assert cases
    for case in cases:
        law = target_distribution(logits, controls(float(case[1])), logits.shape[-1])
        np.testing.assert_allclose(law, oracle[case[0]], **CLOSE, err_msg=case[0])


def test_equals_a_float64_softmax_per_row(rng):
    """Rows with their own temperatures, a greedy one among them, over several columns."""
    logits = rng.normal(size=(4, 3, 11)).astype(np.float32) * 3
    temperatures = (0.7, 0.0, 1.0, 2.5)
    law = np.asarray(target_distribution(jnp.asarray(logits), controls(*temperatures), 11))
    for row, temperature in enumerate(temperatures):
        if temperature:
            np.testing.assert_allclose(law[row], softmax(logits[row], temperature), **CLOSE)
        else:
            expected = np.eye(11)[logits[row].argmax(-1)]
            np.testing.assert_array_equal(law[row], expected)


def test_a_row_does_not_depend_on_its_neighbours(rng):
    logits = jnp.asarray(rng.normal(size=(3, 2, 9)).astype(np.float32))
    together = target_distribution(logits, controls(0.0, 0.3, 1.0), 9)
    for row, temperature in enumerate((0.0, 0.3, 1.0)):
        alone = target_distribution(logits[row : row + 1], controls(temperature), 9)
        np.testing.assert_array_equal(together[row], alone[0])


def test_one_column_axis_or_none_give_the_same_law(rng):
    logits = jnp.asarray(rng.normal(size=(2, 9)).astype(np.float32))
    flat = target_distribution(logits, controls(0.5, 0.0), 9)
    np.testing.assert_array_equal(
        flat, target_distribution(logits[:, None], controls(0.5, 0.0), 9)[:, 0]
    )


def test_greedy_is_the_best_token_and_ties_take_the_lowest_id():
    logits = jnp.array([[1.0, 3.0, 3.0, -1.0], [2.0, 0.0, 2.0, 2.0], [-5.0, -5.0, -5.0, -5.0]])
    np.testing.assert_array_equal(best_token(logits, 4), [1, 0, 0])
    law = target_distribution(logits, controls(0.0, 0.0, 0.0), 4)
    np.testing.assert_array_equal(law, np.eye(4)[[1, 0, 0]])


def test_sampled_ties_share_their_mass():
    law = target_distribution(jnp.array([[2.0, 2.0, 2.0, 2.0]]), controls(0.8), 4)
    np.testing.assert_allclose(law, 0.25, rtol=1e-6)


def test_padded_rows_have_no_mass_however_high_they_score(rng):
    logits = rng.normal(size=(3, 2, 8)).astype(np.float32)
    logits[..., 5:] = 50.0
    temperatures = (0.0, 1.0, 5.0)
    law = np.asarray(target_distribution(jnp.asarray(logits), controls(*temperatures), 5))
    np.testing.assert_array_equal(law[..., 5:], 0.0)
    np.testing.assert_array_equal(law[0, :, :5], np.eye(5)[logits[0, :, :5].argmax(-1)])
    for row in (1, 2):
        np.testing.assert_allclose(
            law[row, :, :5], softmax(logits[row, :, :5], temperatures[row]), **CLOSE
        )
    np.testing.assert_array_equal(best_token(jnp.asarray(logits), 5), logits[..., :5].argmax(-1))
    assert np.isneginf(public_logits(jnp.asarray(logits), 5)[..., 5:]).all()
    np.testing.assert_array_equal(public_logits(jnp.asarray(logits), 8), logits)


@pytest.mark.parametrize("temperature", [1e-37, 1e-8, 1e-3])
def test_a_tiny_temperature_neither_overflows_nor_leaves_the_best_token(temperature):
    logits = jnp.array([[300.0, 299.0, -300.0, 0.0], [-1e4, 3e4, 2e4, -3e4]])
    law = np.asarray(target_distribution(logits, controls(temperature, temperature), 4))
    np.testing.assert_array_equal(law, np.eye(4)[[0, 1]])


def test_a_high_temperature_is_nearly_uniform(rng):
    logits = rng.normal(size=(1, 8)).astype(np.float32)
    law = target_distribution(jnp.asarray(logits), controls(1e4), 8)
    np.testing.assert_allclose(law, softmax(logits, 1e4), **CLOSE)
    np.testing.assert_allclose(law, 1 / 8, rtol=1e-3)


def test_mass_sums_to_one(rng):
    logits = jnp.asarray(rng.normal(size=(3, 5, 50)).astype(np.float32) * 10)
    law = np.asarray(target_distribution(logits, controls(0.0, 0.4, 1.3), 44), np.float64)
    np.testing.assert_allclose(law.sum(-1), 1.0, rtol=2e-6)
    assert law.min() >= 0


def test_controls_keep_the_order_of_rows():
    made = make_controls([Sampling(0.5), Sampling(), Sampling(temperature=2.0)])
    assert isinstance(made, Controls)
    np.testing.assert_array_equal(made.temperature, np.float32([0.5, 0.0, 2.0]))


@pytest.mark.parametrize("temperature", [-0.1, math.inf, -math.inf, math.nan])
def test_a_temperature_that_is_no_finite_number_is_refused(temperature):
    with pytest.raises(ValueError, match=f"temperature: got {temperature}"):
        Sampling(temperature)


def test_greedy_is_the_default():
    assert Sampling() == Sampling(temperature=0.0)
