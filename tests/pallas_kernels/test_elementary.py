"""The small shared functions against float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.elementary import (
    apply_rotary,
    normed_key,
    represented,
    rms_norm,
    rotary_tables,
    stable_top_k,
)


def test_rms_norm_uses_a_plain_gain():
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(3, 5, 24)), rng.normal(size=24)
    expected = weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    got = rms_norm(jnp.float32(x), jnp.float32(weight), 1e-6)
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-6)  # a few float32 ulps
    zero = rms_norm(jnp.zeros((2, 8)), jnp.ones(8), 1e-6)
    np.testing.assert_array_equal(zero, np.zeros((2, 8)))


def test_rms_norm_of_bfloat16_is_rounded_once():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 64)), jnp.bfloat16)
    weight = jnp.asarray(np.random.default_rng(2).normal(size=64), jnp.bfloat16)
    got = rms_norm(x, weight, 1e-6)
    assert got.dtype == jnp.bfloat16
    wide = np.float64(x)
    expected = np.float64(weight) * wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    # Half an ulp of 8 significant bits.
    half_ulp = 2.0 ** (np.floor(np.log2(np.abs(expected))) - 8)
    assert (np.abs(np.float64(got) - expected) <= half_ulp * 1.001).all()


@pytest.mark.parametrize("theta, rotary_dim", [(1e7, 128), (1e4, 20), (1e6, 2)])
def test_inverse_frequencies_number_by_number(theta, rotary_dim):
    # Position 1 and small angles: the table shows the frequency itself, to float32.
    cos, sin = rotary_tables(jnp.array([0, 1]), theta, rotary_dim)
    assert cos.shape == sin.shape == (2, rotary_dim // 2)
    frequency = np.array([theta ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)])
    np.testing.assert_array_equal(cos[0], np.ones(rotary_dim // 2))
    np.testing.assert_allclose(sin[1], np.sin(frequency), rtol=3e-7)


def test_rotary_pairs_halves_and_passes_the_rest():
    # A quarter turn: (first, second) -> (-second, first), in the rotated part only.
    x = jnp.arange(1.0, 7.0).reshape(1, 1, 6)
    got = apply_rotary(x, jnp.zeros((1, 2)), jnp.ones((1, 2)))
    np.testing.assert_array_equal(got[0, 0], [-3, -4, 1, 2, 5, 6])
    with pytest.raises(ValueError, match="cos: got 4 frequencies"):
        apply_rotary(x, jnp.zeros((1, 4)), jnp.ones((1, 4)))


def test_rotary_scores_depend_on_distance_only():
    rng = np.random.default_rng(3)
    q, k = (jnp.float32(rng.normal(size=(1, 32))) for _ in range(2))

    @jax.jit
    def score(p, r):
        rotated = [apply_rotary(x, *rotary_tables(at, 1e4, 32)) for x, at in ((q, p), (k, r))]
        return jnp.sum(rotated[0] * rotated[1])

    # Angles of some 50 radians in float32 are off by 3e-6 each; 32 products of size about 1.
    assert abs(score(5, 2) - score(53, 50)) < 1e-4
    assert abs(score(5, 2) - score(5, 4)) > 1e-2


def test_normed_key_keeps_float32():
    rng = np.random.default_rng(4)
    key = jnp.asarray(rng.normal(size=(2, 3, 2, 16)), jnp.bfloat16)
    gain = jnp.ones(16)
    positions = jnp.array([[0, 1, 2], [7, 8, 9]])
    got = normed_key(key, gain, positions, 1e-6, 1e4)
    assert got.dtype == jnp.float32
    unrotated = rms_norm(key.astype(jnp.float32), gain, 1e-6)
    np.testing.assert_array_equal(got[0, 0], unrotated[0, 0])
    expected = apply_rotary(unrotated, *rotary_tables(positions, 1e4, 16))
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)  # fusion may reassociate


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape, k", [((3, 50), 16), ((2, 4, 3000), 16), ((7,), 7), ((2, 9), 1)])
def test_stable_top_k(shape, k, dtype):
    # Few distinct values, so that the border of the list is nearly always a tie.
    rng = np.random.default_rng(5)
    logits = jnp.asarray(rng.integers(-3, 4, size=shape), dtype)
    scores, ids = jax.jit(stable_top_k, static_argnums=1)(logits, k)
    assert ids.dtype == jnp.int32 and scores.dtype == logits.dtype
    expected = np.argsort(-np.float64(logits), axis=-1, kind="stable")[..., :k]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(scores, np.take_along_axis(np.asarray(logits), expected, -1))


def test_stable_top_k_takes_both_zeros_as_equal():
    logits = jnp.array([-0.0, 0.0, -1.0, 0.0, -0.0])
    _, ids = jax.jit(stable_top_k, static_argnums=1)(logits, 4)
    np.testing.assert_array_equal(ids, [0, 1, 3, 4])


@pytest.mark.parametrize("k", [0, 6])
def test_stable_top_k_range(k):
    with pytest.raises(ValueError, match=f"k: got {k}"):
        stable_top_k(jnp.zeros(5), k)


def test_represented_rounds_even_where_xla_could_skip_it():
    x = np.random.default_rng(6).normal(size=1000).astype(np.float32)
    expected = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    got = jax.jit(lambda x: represented(x, jnp.bfloat16).astype(jnp.float32))(x)
    np.testing.assert_array_equal(got, expected)
    assert represented(jnp.float32(x), jnp.float32).dtype == jnp.float32
