"""The certificate certifies: real functions pass it, and each planted fault fails."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Sampling
from dflash_jax.decoding import acceptance, distribution, propose
from dflash_jax.decoding.acceptance import Proposal
from dflash_jax.decoding.certificate import Enumerator, sampled_sequences
from dflash_jax.decoding.randomness import Purpose
from experiments import exactness
from experiments.configs.toy import make_toy

VOCABULARY, DRAFT_TOKENS, LENGTH = 4, 2, 4
FILTERED = Sampling(0.9, 3, 0.9, 0.02, 0.7, 0.3, 1.4)
FREE = Sampling(1.0)
FAULT = 1e-3  # far beyond rounding; every planted fault moves some probability by more


@functools.cache
def toy(dflash2):
    return make_toy(VOCABULARY, dflash2, DRAFT_TOKENS)


@functools.cache
def target_law(dflash2, sampling):
    return exactness.chain_law(toy(dflash2), sampling, LENGTH)


def difference(dflash2, sampling):
    law = Enumerator(toy(dflash2)).law(sampling, LENGTH)
    return np.abs(law - target_law(dflash2, sampling)).max()


@pytest.mark.parametrize("sampling", [FREE, FILTERED], ids=["free", "filtered"])
@pytest.mark.parametrize("dflash2", [False, True])
def test_the_emitted_law_is_the_target_s(dflash2, sampling):
    law = target_law(dflash2, sampling)
    assert np.count_nonzero(law > 1e-3) > 10  # no foregone conclusion
    assert difference(dflash2, sampling) <= exactness.EXACT


# --- planted faults ---


def kept_in_the_wrong_order(scaled, controls):
    """top-p first, on the whole law, and top-k after it."""
    off = controls._replace(top_k=jnp.zeros_like(controls.top_k))
    by_mass = KEPT(scaled, off)
    return by_mass & KEPT(jnp.where(by_mass, scaled, -1e9), controls)


def unfiltered(scaled, controls):
    return jnp.ones_like(scaled, bool)


def stale_penalties(logits, controls, counts, drafted):
    return PENALISE(logits, controls, counts, jnp.full_like(drafted, -1))


def uncounted_output(logits, controls, counts, drafted):
    return PENALISE(logits, controls, counts._replace(output=0 * counts.output), drafted)


def q_of_another_row(*args):
    proposal = WALK(*args)
    return proposal._replace(q=jnp.roll(proposal.q, 1, axis=0))


def q_of_another_column(*args):
    proposal = WALK(*args)
    return proposal._replace(q=jnp.roll(proposal.q, 1, axis=1))


def correction_a_row_early(law, proposal, accepted):
    rejected = accepted < proposal.count
    return EXTRA(law, proposal, jnp.where(rejected, jnp.maximum(accepted - 1, 0), accepted))


def bonus_a_column_early(law, proposal, accepted):
    here = EXTRA(law, proposal, accepted)
    early = jnp.take_along_axis(law, jnp.maximum(accepted - 1, 0)[:, None, None], axis=1)[:, 0]
    return jnp.where((accepted == proposal.count)[:, None], early, here)


def residual_not_renormalised(law, candidates, q):
    rows = jnp.arange(law.shape[0])[:, None]
    return jnp.maximum(law.at[rows, candidates].add(-q, mode="drop"), 0.0)


def corrections_from_p(law, candidates, q):
    return law


def softmax_for_an_argmax(tokens, count):
    """The argmax is proposed, but a softmax is scored."""
    other = (tokens + 1) % VOCABULARY
    q = jnp.broadcast_to(jnp.array([0.7, 0.3]), (*tokens.shape, 2))
    return Proposal(tokens, jnp.stack([tokens, other], axis=-1), q, count)


KEPT, PENALISE = distribution._kept, distribution._penalise
WALK, EXTRA = propose.walk, acceptance.extra_law

FAULTS = [
    (distribution, "_kept", kept_in_the_wrong_order, True),
    (distribution, "_kept", unfiltered, True),
    (distribution, "_penalise", stale_penalties, True),
    (distribution, "_penalise", uncounted_output, True),
    (propose, "walk", q_of_another_row, True),
    (propose, "walk", q_of_another_column, True),
    (acceptance, "extra_law", correction_a_row_early, True),
    (acceptance, "extra_law", bonus_a_column_early, True),
    (acceptance, "residual", residual_not_renormalised, True),
    (acceptance, "residual", corrections_from_p, False),
    (propose, "point_mass", softmax_for_an_argmax, False),
]


@pytest.mark.parametrize(
    "module, name, fault, dflash2", FAULTS, ids=[fault.__name__ for _, _, fault, _ in FAULTS]
)
def test_a_planted_fault_is_seen(monkeypatch, module, name, fault, dflash2):
    monkeypatch.setattr(module, name, fault)
    assert difference(dflash2, FILTERED) > FAULT


def test_a_leak_from_the_padded_vocabulary_is_seen(monkeypatch):
    monkeypatch.setattr(distribution, "public_logits", lambda logits, public_vocab: logits)
    with pytest.raises(ArithmeticError, match="outside the public vocabulary"):
        difference(True, FREE)


def chi_square(trials=4096):
    observed = exactness.sample_toy(toy(True), FREE, LENGTH, trials)
    return exactness.p_value(observed.reshape(-1), target_law(True, FREE).reshape(-1))


@pytest.mark.slow
def test_samples_follow_the_law_unless_proposal_and_acceptance_share_keys(monkeypatch):
    assert chi_square() > exactness.SIGNIFICANCE
    # A fault of the random numbers: no enumeration of decisions can show it.
    monkeypatch.setattr(propose, "Purpose", SimpleNamespace(PROPOSAL=Purpose.ACCEPT))
    jax.clear_caches()
    try:
        assert chi_square() < 1e-6
    finally:
        jax.clear_caches()  # the faulty program must not outlive this test


# --- judging ---


def test_p_value_by_hand():
    fair = np.full(4, 0.25)
    assert exactness.p_value(np.array([25, 25, 25, 25]), fair) == 1.0
    # (30-25)^2 / 25 * 4 = 4 with three degrees of freedom.
    got = exactness.p_value(np.array([30, 20, 30, 20]), fair)
    np.testing.assert_allclose(got, 0.261464, rtol=1e-5)
    assert exactness.p_value(np.array([1, 50]), np.array([0.0, 1.0])) == 0
    # Cells under five expected are pooled: here the last three, 3 expected and 9 seen.
    pooled = exactness.p_value(np.array([91, 3, 3, 3]), np.array([0.97, 0.01, 0.01, 0.01]))
    np.testing.assert_allclose(pooled, 4.36023e-4, rtol=1e-5)


def test_bonferroni():
    checks = [{"p": 0.02}, {"p": 0.004}, {"passed": True}]
    assert not exactness.correct_and_judge(checks)
    assert [check["passed"] for check in checks] == [True, False, True]
    assert [check.get("corrected_p") for check in checks] == [0.04, 0.008, None]


def test_sampled_sequences_keep_the_order_of_seeds():
    both = sampled_sequences(toy(False), FREE, LENGTH, [5, 9])
    swapped = sampled_sequences(toy(False), FREE, LENGTH, [9, 5])
    np.testing.assert_array_equal(both, swapped[::-1])
    assert both.shape == (2, LENGTH) and both.max() < VOCABULARY
