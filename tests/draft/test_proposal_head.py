"""Scores of the proposal head: multiplier, soft cap, public vocabulary."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.draft.proposal_head import (
    head_scores,
    proposal_scores,
    take_rows,
    to_token_ids,
)
from pallas_kernels.elementary import stable_top_k


@pytest.fixture(scope="module")
def config(load_draft):
    return load_draft("draft_v1_noncausal").config


@pytest.mark.parametrize("multiplier, cap", [(1.0, None), (0.25, None), (1.0, 5.0), (3.0, 30.0)])
def test_equals_float64(config, rng, multiplier, cap):
    config = dataclasses.replace(
        config, output_multiplier=multiplier, final_logit_softcapping=cap
    )
    head = rng.normal(scale=8, size=(2, 3, 40)).astype(np.float32)
    expected = np.float64(head) * multiplier  # the cap comes after the multiplier
    if cap is not None:
        expected = cap * np.tanh(expected / cap)
    expected[..., 33:] = -np.inf
    got = proposal_scores(config, jnp.asarray(head), 33)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-6)


def test_padding_rows_are_never_proposed(config, rng):
    # Rows beyond the public vocabulary score far above everything else.
    head = rng.normal(size=(1, 6, 40)).astype(np.float32)
    head[..., 33:] = 50
    for cap in (None, 30.0):
        capped = dataclasses.replace(config, final_logit_softcapping=cap)
        scores = proposal_scores(capped, jnp.asarray(head), 33)
        np.testing.assert_array_equal(np.argmax(scores, -1), np.argmax(head[..., :33], -1))
        _, candidates = stable_top_k(scores, 16)
        wanted = np.argsort(-head[..., :33], axis=-1, kind="stable")[..., :16]
        np.testing.assert_array_equal(candidates, wanted)
    everything = proposal_scores(config, jnp.asarray(head), 40)
    assert (np.argmax(everything, -1) == 33).all()


def test_bfloat16_scores_become_float32(config, rng):
    # Scaled and capped after the cast: the result has more than 8 significant bits.
    config = dataclasses.replace(config, output_multiplier=0.3)
    head = jnp.asarray(rng.normal(size=(1, 2, 9)), jnp.bfloat16)
    got = proposal_scores(config, head, 9)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, np.float64(head) * np.float32(0.3), rtol=1e-6)


def test_an_indexed_head_scores_its_rows_and_names_their_tokens(config, rng):
    weight = rng.normal(size=(40, 8)).astype(np.float32)
    hidden = rng.normal(size=(2, 3, 8)).astype(np.float32)
    ids = np.array([0, 3, 7, 20, 33, 39])
    head = take_rows(jnp.asarray(weight), jnp.asarray(ids))
    whole = hidden @ weight.T
    got = head_scores(head, jnp.asarray(hidden))
    np.testing.assert_allclose(got, whole[..., ids], rtol=1e-5, atol=1e-6)
    scores = proposal_scores(config, head_scores(head, jnp.asarray(hidden)), 35, head)
    assert np.isneginf(scores[..., 5]).all() and np.isfinite(scores[..., :5]).all()
    best = to_token_ids(head, jnp.argmax(scores, axis=-1))
    np.testing.assert_array_equal(best, ids[:5][whole[..., ids[:5]].argmax(-1)])
    assert to_token_ids(None, best) is best
