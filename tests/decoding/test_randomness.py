"""Counter-keyed draws: every name its own numbers, and the right law behind them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoding.randomness import Purpose, draw_tokens, key_for, uniforms

TRIALS = 131_072
SIGMAS = 4.5  # two-sided 7e-6: some tens of such checks on fixed seeds, none by luck


def seeds(count):
    return jnp.arange(count, dtype=jnp.uint32)


def correlation(x, y):
    return np.corrcoef(np.ravel(x), np.ravel(y))[0, 1]


def test_every_name_has_its_own_key():
    names = list(itertools.product(range(5), [*range(20), 4096, 4097], Purpose))
    seed, position, purpose = (jnp.asarray(x) for x in zip(*names, strict=True))
    keys = jax.random.key_data(jax.vmap(key_for)(seed.astype(jnp.uint32), position, purpose))
    assert len({tuple(key) for key in np.asarray(keys).tolist()}) == len(names)


def test_no_two_purposes_share_a_number():
    assert len(Purpose) == len(Purpose.__members__)  # an equal value would be an alias


def test_uniforms_are_named_by_position_not_by_round():
    """Columns 2.. of one round are columns 0.. of a round that starts two tokens later."""
    long = uniforms(seeds(3), jnp.array([5, 9, 700]), 7, Purpose.ACCEPT)
    later = uniforms(seeds(3), jnp.array([7, 11, 702]), 5, Purpose.ACCEPT)
    np.testing.assert_array_equal(long[:, 2:], later)
    assert np.unique(np.asarray(long)).size == long.size


def test_a_row_draws_the_same_numbers_anywhere():
    seed = jnp.array([7, 3, 9, 4, 7], jnp.uint32)
    start = jnp.array([12, 0, 5, 99, 12])
    batch = uniforms(seed, start, 4, Purpose.PROPOSAL)
    np.testing.assert_array_equal(batch[0], batch[4])
    order = jnp.array([3, 0, 4, 2, 1])
    np.testing.assert_array_equal(
        uniforms(seed[order], start[order], 4, Purpose.PROPOSAL), batch[order]
    )
    for row in range(4):
        alone = uniforms(seed[row : row + 1], start[row : row + 1], 4, Purpose.PROPOSAL)
        np.testing.assert_array_equal(alone[0], batch[row])
    # Same position, other seed: another number.
    others = uniforms(seeds(64), jnp.full(64, 12), 1, Purpose.ACCEPT)
    assert np.unique(np.asarray(others)).size == 64


def test_large_seeds_and_positions_are_told_apart():
    seed = jnp.array([0, 1, 2**31, 2**32 - 1], jnp.uint32)
    first = uniforms(seed, jnp.full(4, 2**20), 2, Purpose.ACCEPT)
    assert np.unique(np.asarray(first)).size == first.size


def test_uniforms_are_uniform_for_every_purpose():
    for purpose in Purpose:
        drawn = np.asarray(uniforms(seeds(TRIALS), jnp.full(TRIALS, 40), 1, purpose))[:, 0]
        assert 0 <= drawn.min() and drawn.max() < 1
        counts = np.histogram(drawn, bins=16, range=(0, 1))[0]
        spread = np.sqrt(TRIALS * (1 / 16) * (15 / 16))
        np.testing.assert_array_less(np.abs(counts - TRIALS / 16) / spread, SIGMAS)


def test_purposes_positions_and_seeds_are_uncorrelated():
    """Proposal against accept above all: sharing their numbers shifts the output law."""
    start = jnp.full(TRIALS, 40)
    drawn = {purpose: uniforms(seeds(TRIALS), start, 2, purpose) for purpose in Purpose}
    limit = SIGMAS / np.sqrt(TRIALS)
    for one, other in itertools.combinations(Purpose, 2):
        for column in range(2):
            r = correlation(drawn[one][:, column], drawn[other][:, column])
            assert abs(r) < limit, (one, other, r)
    for purpose in Purpose:
        assert abs(correlation(drawn[purpose][:, 0], drawn[purpose][:, 1])) < limit
        assert abs(correlation(drawn[purpose][:-1, 0], drawn[purpose][1:, 0])) < limit
    # The same check does see shared numbers.
    accept = drawn[Purpose.ACCEPT]
    assert abs(correlation(accept, accept)) > limit


def test_token_draws_are_uncorrelated_with_uniforms_of_other_purposes():
    """A correction drawn with the number that caused the rejection would be biased."""
    law = jnp.broadcast_to(jnp.array([0.5, 0.5]), (TRIALS, 2))
    position = jnp.full(TRIALS, 40)
    accept = uniforms(seeds(TRIALS), position, 1, Purpose.ACCEPT)
    for purpose in (Purpose.CORRECTION, Purpose.BONUS, Purpose.TARGET):
        drawn = draw_tokens(law, seeds(TRIALS), position, jnp.full(TRIALS, purpose))
        assert abs(correlation(drawn, accept)) < SIGMAS / np.sqrt(TRIALS)


@pytest.mark.parametrize("purpose", [Purpose.CORRECTION, Purpose.BONUS, Purpose.TARGET])
def test_drawn_tokens_follow_the_law(purpose):
    law = np.array([0.0, 0.05, 0.6, 0.0, 0.349, 0.001])
    scaled = jnp.broadcast_to(jnp.asarray(3.0 * law), (TRIALS, 6))  # need not be normalised
    drawn = draw_tokens(scaled, seeds(TRIALS), jnp.full(TRIALS, 8), jnp.full(TRIALS, purpose))
    frequency = np.bincount(drawn, minlength=6) / TRIALS
    assert frequency[0] == frequency[3] == 0, "a token of zero mass was drawn"
    sigma = np.sqrt(law * (1 - law) / TRIALS)
    np.testing.assert_array_less(np.abs(frequency - law), SIGMAS * sigma + 1e-12)


def test_zero_mass_is_never_drawn_even_from_one_hot_and_tiny_laws():
    for token in (0, 3, 6):
        law = jnp.zeros((4096, 7)).at[:, token].set(1e-30)
        drawn = draw_tokens(law, seeds(4096), jnp.arange(4096), jnp.zeros(4096, jnp.int32))
        np.testing.assert_array_equal(drawn, token)


def test_rows_of_a_draw_differ_in_law_and_purpose():
    law = jnp.array([[0.2, 0.8], [0.8, 0.2], [0.2, 0.8]])
    seed, position = jnp.array([5, 5, 6], jnp.uint32), jnp.array([3, 3, 9])
    purpose = jnp.array([Purpose.CORRECTION, Purpose.BONUS, Purpose.CORRECTION])
    batch = draw_tokens(law, seed, position, purpose)
    alone = [
        int(draw_tokens(*(x[row : row + 1] for x in (law, seed, position, purpose)))[0])
        for row in range(3)
    ]
    np.testing.assert_array_equal(batch, alone)
