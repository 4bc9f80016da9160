"""Figures by hand: means, intervals, acceptance per position, origins."""

import math

import numpy as np
import pytest

from dflash_jax import Generation, Origin, Round
from dflash_jax.decoding.result import accepted_per_position
from experiments import measure, prompts, show


def generation(rounds, tokens=None, draft_tokens=7):
    count = 1 + sum(r.committed for r in rounds)
    return Generation(
        tokens=list(range(count)) if tokens is None else tokens,
        text="text",
        finish_reason="length",
        rounds=rounds,
        draft_tokens=draft_tokens,
        block_attention="non-causal",
    )


GROUPS = [np.asarray(group) for group in ([1, 2, 3], [8], [4, 4, 4, 4, 4, 4])]


# --- means and intervals ---


def test_pooled_mean_weighs_rounds_not_prompts():
    assert measure.pooled_mean(GROUPS) == pytest.approx(np.concatenate(GROUPS).mean())
    assert measure.pooled_mean(GROUPS) == pytest.approx(3.8)
    assert measure.pooled_mean([np.asarray([]), np.asarray([2, 5])]) == 3.5
    assert math.isnan(measure.pooled_mean([np.asarray([])]))


def test_bootstrap_resamples_whole_prompts():
    picks = np.random.default_rng(0).integers(0, 3, (1000, 3))
    means = [np.concatenate([GROUPS[i] for i in pick]).mean() for pick in picks]
    expected = np.quantile(means, [0.025, 0.975])
    np.testing.assert_allclose(measure.bootstrap_interval(GROUPS), expected, rtol=1e-12)
    assert measure.bootstrap_interval(GROUPS) == measure.bootstrap_interval(GROUPS)


def test_bootstrap_covers_about_95_percent():
    random = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        groups = [random.poisson(3.0, random.integers(5, 20)) for _ in range(40)]
        low, high = measure.bootstrap_interval(groups, samples=200)
        hits += low <= 3.0 <= high
    assert 0.89 < hits / 200 < 0.99


def test_intervals_of_nothing_and_of_one_prompt():
    assert all(math.isnan(x) for x in measure.bootstrap_interval([np.asarray([])]))
    assert measure.bootstrap_interval([np.asarray([1, 2])]) == (1.5, 1.5)
    # A prompt without rounds says nothing; a resample of such prompts would have no mean.
    assert measure.bootstrap_interval([np.asarray([]), np.asarray([4])]) == (4.0, 4.0)


def test_summary_of_a_setting():
    results = [
        generation([Round(7, 7, 4, 5), Round(7, 2, 0, 1)]),
        generation([Round(7, 7, 7, 8), Round(7, 0, 0, 1)]),
    ]
    row = measure.summarise("x", 7, results, seconds=0.5)
    assert row["tokens"] == 15  # the first token of each prompt belongs to the prefill
    assert row["tokens_per_second"] == 30
    assert (row["prompts"], row["rounds"], row["rounds_without_proposals"]) == (2, 4, 1)
    assert row["acceptance_length"] == pytest.approx((5 + 1 + 8) / 3)
    low, high = row["acceptance_interval"]
    assert (low, high) == (3.0, 8.0)  # the first prompt twice, the second twice
    third = 1 / 3
    np.testing.assert_allclose(
        row["accepted_per_position"], [2 * third, 2 * third, 1, 1, 0.5, 0.5, 0.5]
    )


# --- what a generation says of itself ---


def test_accepted_per_position_counts_only_rounds_that_got_there():
    rounds = [Round(3, 3, 3, 4), Round(3, 3, 1, 2), Round(3, 1, 1, 2), Round(3, 3, 0, 1)]
    np.testing.assert_allclose(accepted_per_position(rounds, 3), [3 / 4, 1 / 3, 1 / 3])
    shares = accepted_per_position([Round(3, 1, 1, 2)], 3)
    assert shares[0] == 1.0 and all(math.isnan(share) for share in shares[1:])
    assert accepted_per_position([Round(0, 0, 0, 1)], 0) == []


def test_acceptance_length_counts_the_targets_token_and_skips_plain_rounds():
    result = generation([Round(7, 7, 4, 5), Round(7, 7, 0, 1), Round(7, 0, 0, 1)])
    assert result.acceptance_length == (5 + 1) / 2
    assert math.isnan(generation([Round(0, 0, 0, 1)]).acceptance_length)
    assert math.isnan(generation([]).acceptance_length)
    # A stop inside the block: accepted counts, though fewer were committed.
    assert generation([Round(7, 7, 4, 2)]).acceptance_length == 5


def test_origins():
    prompt, draft, correction, bonus, plain = Origin
    rounds = [
        Round(3, 3, 2, 3),  # two accepted, third rejected
        Round(3, 3, 0, 1),  # all rejected
        Round(3, 3, 3, 4),  # all accepted
        Round(3, 0, 0, 1),  # nothing proposed
        Round(3, 2, 2, 3),  # a narrow tail, all of it accepted
        Round(3, 3, 3, 2),  # stopped by the second accepted token
    ]
    result = generation(rounds)
    assert result.origins == [
        prompt,
        *(draft, draft, correction),
        correction,
        *(draft, draft, draft, bonus),
        plain,
        *(draft, draft, bonus),
        *(draft, draft),
    ]
    assert len(result.origins) == len(result.tokens)
    assert generation([]).origins == [prompt]


def test_json_of_a_generation_has_no_nan():
    plain = show.as_json("p", generation([Round(0, 0, 0, 1)], draft_tokens=0))
    assert plain["acceptance_length"] is None
    assert plain["origins"] == ["prompt", "plain"]
    drafted = show.as_json("p", generation([Round(7, 7, 4, 5)]))
    assert drafted["acceptance_length"] == 5
    assert drafted["rounds"] == [{"proposed": 7, "verified": 7, "accepted": 4, "committed": 5}]


def test_summary_line():
    line = show.summary(generation([Round(7, 7, 4, 5), Round(7, 7, 1, 2)]))
    assert line == "8 tokens in 2 rounds, 7 draft tokens, tau 3.50, finished by length"


def test_colours_follow_origins_and_wait_for_whole_characters():
    class Bytes:
        """One byte a token."""

        def decode(self, ids):
            return bytes(ids).decode("utf-8", errors="replace")

    text = "aé!b"  # é has two bytes: the second is a draft, the first the prompt's choice
    tokens = list(text.encode())
    result = generation([Round(3, 3, 3, 4)], tokens=[tokens[0], *tokens[1:]])
    line = show.coloured(Bytes(), "x ", result)
    assert line.plain == "x " + text
    styles = [span.style for span in line.spans]
    draft, bonus = show.STYLES[Origin.DRAFT], show.STYLES[Origin.BONUS]
    assert styles == [show.STYLES[Origin.PROMPT], draft, draft, bonus]


# --- prompts ---


def test_prompts_are_cut_and_counted():
    class Characters:
        def encode(self, text):
            return [ord(c) for c in text]

    first, second = prompts.held_out_prompts(Characters(), 2, 30)
    assert len(first) == len(second) == 30 and first != second
    assert prompts.held_out_prompts(Characters(), 5, 12)[1] == second[:12]
    for count in (0, 65):
        with pytest.raises(ValueError, match=f"prompts: got {count}, expected 1..64"):
            prompts.held_out_prompts(Characters(), count, 30)
    for tokens in (0, 2401):
        with pytest.raises(ValueError, match=f"prompt tokens: got {tokens}, expected 1..2400"):
            prompts.held_out_prompts(Characters(), 2, tokens)
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        prompts.held_out_prompts(None, 2, 30)
