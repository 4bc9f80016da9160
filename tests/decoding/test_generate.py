"""Whole generations: the reference's traces, plain text, endings, seeds, compilations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import Causality
from dflash_jax.decoding.distribution import Sampling
from dflash_jax.decoding.generate import MAX_ROWS, generate, prepare
from dflash_jax.decoding.loop import decode, prefill_prompts
from dflash_jax.decoding.result import Generation, Origin, Round, accepted_per_position
from dflash_jax.io.pair import load_pair
from dflash_jax.io.tensors import stream_tensors
from dflash_jax.target.model import TargetModel
from dflash_jax.training.target import hidden_states
from tests.decoding import tiny

NEW = 50
TIE = 1e-5


class Numerals:
    """A tokenizer whose text is its numbers: "12 7" <-> [12, 7]."""

    def __init__(self, vocab_size, eos_token_ids=()):
        self.vocab_size, self.eos_token_ids = vocab_size, tuple(eos_token_ids)

    def encode(self, text):
        return [int(word) for word in text.split()]

    def decode(self, ids):
        return " ".join(map(str, ids))


def stopping_at(pair, *ids):
    """The pair with stop ids; always two of them, so that one compilation does for all."""
    ids = (ids * 2)[:2]
    return dataclasses.replace(pair, tokenizer=Numerals(pair.target.vocab_size, ids))


def ending(text, stops, budget):
    """What a generation must publish of an endless text, and why it ends there."""
    for index, token in enumerate(text[:budget]):
        if token in stops:
            return text[: index + 1], "stop"
    return text[:budget], "length"


# --- the reference's traces ------------------------------------------------------------------


class Trace:
    """A pair of checkpoints and the generations that the reference package made with it."""

    def __init__(self, folder, name):
        # The v1 trace was made with sliding layers causal, which its config does not say.
        self.pair = load_pair(
            folder / "dense_text", folder / name, absent_causality=Causality.SLIDING_CAUSAL
        )
        tensors = dict(stream_tensors(folder / name / "trace.safetensors"))
        names = sorted({key.split(".")[0] for key in tensors}, key=lambda n: int(n[1:]))[:MAX_ROWS]
        self.prompts = [tensors[f"{n}.prompt"][0].tolist() for n in names]
        self.texts = [
            tensors[f"{n}.output_ids"][0, len(prompt) :].tolist()
            for n, prompt in zip(names, self.prompts, strict=True)
        ]
        self.lengths = [tensors[f"{n}.acceptance_lengths"].tolist() for n in names]
        self.blocks = [tensors[f"{n}.blocks"] for n in names]
        self.draft_tokens = self.blocks[0].shape[1] - 1
        self.new = len(self.texts[0])
        # Two stop ids here too, which never come: one compilation for all tests with the trace.
        seen = {token for text in self.texts for token in text}
        unused = set(range(self.pair.target.vocab_size)) - seen - {self.pair.draft.mask_token_id}
        self.endless = stopping_at(self.pair, min(unused))

    def generate(self, pair=None, new=None, **kwargs):
        return generate(
            pair or self.endless,
            self.prompts,
            draft_tokens=self.draft_tokens,
            max_new_tokens=new or self.new,
            **kwargs,
        )


@functools.cache
def load_trace(folder, name):
    return Trace(folder, name)


@pytest.fixture(params=["mid_dense_v1", "mid_dense_v2"])
def trace(request, fixtures_dir):
    return load_trace(fixtures_dir, request.param)


@pytest.fixture
def accepting(fixtures_dir):
    """The trace for tests of endings: a fitted draft, so that blocks are really accepted."""
    return load_trace(fixtures_dir, "mid_dense_v1")


def test_tokens_and_rounds_equal_the_reference(trace):
    results = trace.generate()
    for row, result in enumerate(results):
        assert result.tokens == trace.texts[row]
        assert result.finish_reason == "length"
        assert [r.accepted + 1 for r in result.rounds] == trace.lengths[row]
        assert [r.committed for r in result.rounds] == trace.lengths[row]
        assert result.acceptance_length == pytest.approx(taken(result.rounds), rel=1e-12)
        assert result.draft_tokens == trace.draft_tokens
        assert result.block_attention == trace.pair.draft.causality.value
    # The drafts were fitted to some of the prompts: the trace exercises long accepted runs.
    assert max(r.accepted for r in results[0].rounds) >= trace.draft_tokens // 2


def taken(rounds):
    """Mean tokens per round among those that verified anything."""
    return float(np.mean([r.accepted + 1 for r in rounds if r.verified > 0]))


@pytest.mark.slow
def test_verified_blocks_equal_the_reference(trace):
    """Anchor and proposals of every round, column by column, by the functions of the round.

    Near the end of a text the reference's blocks are narrower (-1) or wider by one than ours:
    those rounds are compared by their published tokens only.
    """
    rows, k = len(trace.prompts), trace.draft_tokens
    phases, controls = tiny.Phases(trace.pair, k), tiny.greedy(rows)
    state = prepare(trace.pair, trace.prompts, draft_tokens=k, max_new_tokens=trace.new).prefill()
    published = [[int(anchor)] for anchor in state.anchor]
    rounds, compared = [0] * rows, 0
    while any(len(text) < trace.new for text in published):
        left = np.array([trace.new - len(text) for text in published])
        active, planned = left > 0, np.clip(left - 1, 0, k)
        state = phases.catch_up(state)
        proposal = phases.propose(state, controls, jnp.asarray(planned))
        blocks = np.concatenate([state.anchor[:, None], proposal.tokens], axis=1)
        verified = phases.verify(state, proposal, jnp.asarray(active))
        accepted = phases.accept(state, verified, proposal, controls)
        count = np.where(active, accepted.licensed, 0)
        state = phases.commit(state, verified, accepted, jnp.asarray(count))
        for row in np.flatnonzero(active):
            expected = trace.blocks[row][rounds[row]]
            assert blocks[row, 0] == expected[0]
            if planned[row] == k and (expected >= 0).all():
                np.testing.assert_array_equal(blocks[row], expected)
                compared += 1
            assert count[row] == trace.lengths[row][rounds[row]]
            published[row] += np.asarray(accepted.tokens)[row, : count[row]].tolist()
            rounds[row] += 1
    assert published == trace.texts
    assert rounds == [len(lengths) for lengths in trace.lengths]
    assert compared > sum(rounds) * 0.6


# --- plain equals speculative ----------------------------------------------------------------


def plain_pair():
    return tiny.pair(None, target=tiny.SMALL)


def tiny_pair(name):
    draft = {"dflash": tiny.DFLASH, "dflash2": tiny.DFLASH2}[name]
    return tiny.pair(draft, target=tiny.SMALL)


@functools.cache
def plain_results():
    return generate(plain_pair(), tiny.prompts(8), draft_tokens=0, max_new_tokens=NEW)


@functools.cache
def forward():
    pair = plain_pair()

    @jax.jit
    def logits(tokens):
        hidden = hidden_states(pair.target, pair.target_params, tokens).hidden
        return TargetModel(pair.target).apply(
            {"params": pair.target_params}, hidden, method="logits"
        )

    return logits


def assert_plain_text(results):
    """Token for token; a differing one passes only on a tie, and ends the comparison."""
    for prompt, expected, result in zip(tiny.prompts(8), plain_results(), results, strict=False):
        assert len(result.tokens) == NEW
        differing = np.flatnonzero(np.array(result.tokens) != np.array(expected.tokens))
        if differing.size:
            at = differing[0]
            text = (prompt + expected.tokens[:at] + [0] * 128)[:128]
            scores = np.asarray(forward()(jnp.asarray([text])))[0, len(prompt) + at - 1]
            gap = abs(scores[expected.tokens[at]] - scores[result.tokens[at]])
            assert gap < TIE, f"token {at} of {len(prompt)}-token prompt: gap {gap}"


def test_plain_decoding_says_what_it_is():
    for result in plain_results():
        assert (result.draft_tokens, result.block_attention) == (0, None)
        assert result.rounds == [Round(0, 0, 0, 1)] * (NEW - 1)
        assert result.origins == [Origin.PROMPT] + [Origin.PLAIN] * (NEW - 1)
        assert np.isnan(result.acceptance_length)
        assert len(set(result.tokens)) > 10


def test_plain_decoding_picks_the_best_token_of_one_forward():
    """The truth the other tests lean on, against the whole text at once."""
    for prompt, result in zip(tiny.prompts(8), plain_results(), strict=True):
        text = (prompt + result.tokens + [0] * 128)[:128]
        scores = np.asarray(forward()(jnp.asarray([text])))[0]
        scores = scores[len(prompt) - 1 : len(prompt) - 1 + NEW]
        chosen = np.take_along_axis(scores, np.asarray(result.tokens)[:, None], axis=1)[:, 0]
        np.testing.assert_array_less(scores.max(axis=1) - chosen, TIE)


SWEEP = [
    pytest.param("dflash2", 7, 3, marks=pytest.mark.smoke),
    pytest.param("dflash2", 1, 8, marks=pytest.mark.slow),
    pytest.param("dflash", 15, 3, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "draft_tokens", "rows"), SWEEP)
def test_any_draft_leaves_the_text_alone(name, draft_tokens, rows):
    """An untrained draft and one that is always wrong; prompts of 1 to 60 tokens."""
    pair = tiny_pair(name)
    results = generate(pair, tiny.prompts(rows), draft_tokens=draft_tokens, max_new_tokens=NEW)
    assert_plain_text(results)
    wrong = generate(
        tiny.always_wrong(pair), tiny.prompts(rows), draft_tokens=draft_tokens, max_new_tokens=NEW
    )
    assert_plain_text(wrong)
    assert len(results) == len(wrong) == rows
    for result in wrong:
        assert {r.accepted for r in result.rounds} == {0}
        assert len(result.rounds) == NEW - 1
        assert result.origins[1:-1] == [Origin.CORRECTION] * (NEW - 2)
    for result in (*results, *wrong):
        left = NEW - 1
        for r in result.rounds:
            assert r.verified == min(draft_tokens, left - 1)
            assert r.proposed == (draft_tokens if pair.draft.dflash2 else r.verified)
            assert r.committed == r.accepted + 1
            left -= r.committed
        assert left == 0


def test_penalties_and_early_stops_leave_plain_and_drafted_text_equal(accepting):
    """Accepted proposals count as the block goes on; a stop id may not come before its time."""
    stop = accepting.texts[0][4]
    pair = stopping_at(accepting.pair, stop)
    samplings = [
        Sampling(presence_penalty=0.2 * (row % 3), frequency_penalty=0.1, repetition_penalty=1.05)
        for row in range(len(accepting.prompts))
    ]
    kwargs = dict(max_new_tokens=accepting.new, min_new_tokens=9, sampling=samplings)
    plain = generate(pair, accepting.prompts, draft_tokens=0, **kwargs)
    drafted = accepting.generate(pair, **{k: v for k, v in kwargs.items() if k != "max_new_tokens"})
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    assert [r.finish_reason for r in drafted] == [r.finish_reason for r in plain]
    assert any(r.accepted for result in drafted for r in result.rounds)
    assert all(stop not in result.tokens[:9] for result in plain)
    # Both did something: the text without them is another one, and has the stop id early.
    assert plain[0].tokens[:5] != accepting.texts[0][:5]


# --- where a generation ends -----------------------------------------------------------------


def test_budgets_give_exactly_as_many_tokens(accepting):
    for budget in range(1, 21):
        results = accepting.generate(new=budget)
        for text, result in zip(accepting.texts, results, strict=True):
            assert result.tokens == text[:budget]
            assert result.finish_reason == "length"
            assert sum(r.committed for r in result.rounds) == budget - 1


def test_a_generation_goes_on_from_where_its_budget_ended(accepting):
    """n tokens and then m more are one run of n + m; the frontier is that of the n visible."""
    more = 11
    for budget in (1, 2, 5, 8, 9, 10, 13):
        job = prepare(
            accepting.endless,
            accepting.prompts,
            draft_tokens=accepting.draft_tokens,
            max_new_tokens=budget,
        )
        state, progress = job.decode(job.prefill())
        first = np.asarray(progress.tokens)
        lengths = [len(prompt) for prompt in accepting.prompts]
        np.testing.assert_array_equal(state.frontier, np.array(lengths) + budget - 1)
        np.testing.assert_array_equal(state.anchor, first[:, budget - 1])
        state, progress = job._replace(budget=jnp.full_like(job.budget, more)).decode(state)
        second = np.asarray(progress.tokens)
        for row, text in enumerate(accepting.texts):
            assert first[row, :budget].tolist() == text[:budget]
            assert second[row, :more].tolist() == text[budget - 1 : budget - 1 + more]


def accepted_inside(result):
    """Indices of tokens that were accepted proposals and not the last of their block."""
    at, found = 1, []
    for r in result.rounds:
        found += range(at, at + r.accepted)
        at += r.committed
    return found


def check_endings(trace, stops, budget):
    """Every row ends as `ending` says; returns the results."""
    results = trace.generate(stopping_at(trace.pair, *stops), budget)
    for text, result in zip(trace.texts, results, strict=True):
        tokens, reason = ending(text, stops, budget)
        assert (result.tokens, result.finish_reason) == (tokens, reason), (stops, budget)
        shown = tokens[:-1] if reason == "stop" else tokens
        assert result.text == " ".join(map(str, shown))
        assert sum(r.committed for r in result.rounds) == len(tokens) - 1
        assert len(result.origins) == len(tokens)
    return results


def test_a_stop_id_inside_a_block_ends_the_text_there(accepting):
    """Ids that plain greedy emits and the draft proposes: accepted with more tokens after them."""
    whole, cut = accepting.generate(), 0
    for row in range(len(whole)):
        text = accepting.texts[row]
        firsts = [at for at in accepted_inside(whole[row]) if text.index(text[at]) == at]
        for at in firsts[:3]:
            results = check_endings(accepting, (text[at],), accepting.new)
            last = results[row].rounds[-1]
            cut += last.committed < last.accepted + 1
            # Several stop ids: the first to come decides.
            check_endings(accepting, (text[at], text[at + 1]), accepting.new)
            # At the budget, one past it, and one before it.
            for budget in (at, at + 1, at + 2):
                check_endings(accepting, (text[at],), budget)
    assert cut >= 2, "no stop came inside an accepted block"


def test_a_stop_id_as_the_first_token_needs_no_round(accepting):
    first = accepting.texts[0][0]
    for budget in (1, 5):
        results = check_endings(accepting, (first,), budget)
        assert (results[0].tokens, results[0].rounds) == ([first], [])
        assert results[0].finish_reason == "stop"
        assert results[0].text == ""


def test_ignored_stop_ids_are_published():
    pair, texts = tiny_pair("dflash2"), [result.tokens for result in plain_results()[:3]]
    pair = stopping_at(pair, texts[0][3], texts[1][5])
    results = generate(pair, tiny.prompts(3), draft_tokens=7, max_new_tokens=NEW, ignore_eos=True)
    for text, result in zip(texts, results, strict=True):
        assert (result.tokens, result.finish_reason) == (text, "length")
        assert result.text == " ".join(map(str, text))


def test_a_stop_id_equal_to_the_mask_stops_only_where_it_is_emitted():
    """The mask fills every block and its tail, and is a word of the target like any other."""
    texts = {True: [], False: []}
    for seed in range(20):
        prompts = tiny.prompts(8, seed, longest=30)
        for prompt, plain in zip(
            prompts,
            generate(plain_pair(), prompts, draft_tokens=0, max_new_tokens=NEW),
            strict=True,
        ):
            texts[tiny.MASK in plain.tokens[1:]].append((prompt, plain.tokens))
        if len(texts[True]) >= 2 and texts[False]:
            break
    chosen = [*texts[True][:2], texts[False][0]]
    results = generate(
        stopping_at(tiny_pair("dflash"), tiny.MASK),
        [prompt for prompt, _ in chosen],
        draft_tokens=15,
        max_new_tokens=NEW,
    )
    for (_, text), result in zip(chosen, results, strict=True):
        assert (result.tokens, result.finish_reason) == ending(text, (tiny.MASK,), NEW)
    assert [r.finish_reason for r in results] == ["stop", "stop", "length"]
    assert len(results[0].tokens) > 1


# --- sampling --------------------------------------------------------------------------------


def test_a_seed_gives_the_same_tokens_in_any_row():
    """Every request in every row, and beside greedy neighbours with other lengths."""
    pair, hot = tiny_pair("dflash2"), Sampling(temperature=0.8)
    prompts = tiny.prompts(8)

    def run(batch, **kwargs):
        results = generate(pair, batch, draft_tokens=7, max_new_tokens=NEW, **kwargs)
        return [result.tokens for result in results]

    requests, seeds = prompts[4:7], [7, 1, 2]
    first = run(requests, sampling=hot, seed=seeds)
    assert all(len(tokens) == NEW for tokens in first)
    for order in ([1, 2, 0], [2, 0, 1]):
        moved = run([requests[i] for i in order], sampling=hot, seed=[seeds[i] for i in order])
        assert moved == [first[i] for i in order]
    # The same request with other seeds, and a number that counts up by row.
    twice = run([requests[0]] * 3, sampling=hot, seed=[7, 8, 7])
    assert twice[0] == twice[2] == first[0] != twice[1]
    assert run([requests[0]] * 3, sampling=hot, seed=np.int64(7))[:2] == twice[:2]
    assert run([requests[0]] * 3, sampling=hot, seed=2**32 + 7)[0] == first[0]
    # A greedy neighbour is plain greedy, and changes nothing.
    mixed = run(
        [prompts[1], requests[1], requests[0]], sampling=[Sampling(), hot, hot], seed=[3, 1, 7]
    )
    assert mixed[1:] == [first[1], first[0]]
    assert mixed[0] == plain_results()[1].tokens


@pytest.mark.slow
def test_a_seed_gives_the_same_tokens_alone():
    pair, prompts = tiny_pair("dflash2"), tiny.prompts(8)
    kwargs = dict(draft_tokens=7, max_new_tokens=NEW, sampling=Sampling(temperature=0.8))
    for seed in (7, 70):
        together = generate(pair, prompts[2:5], seed=[seed - 1, seed + 1, seed], **kwargs)
        for row, own in enumerate((seed - 1, seed + 1, seed)):
            alone = generate(pair, prompts[2 + row], seed=own, **kwargs)
            assert alone[0].tokens == together[row].tokens


def test_sampled_plain_decoding():
    """No proposal columns at all; the first token, drawn by the prefill, is everywhere the same."""
    prompts, hot = tiny.prompts(8), Sampling(temperature=0.8)
    pair = plain_pair()
    results = generate(pair, prompts, max_new_tokens=NEW, sampling=hot, seed=11)
    again = generate(pair, prompts[::-1], max_new_tokens=NEW, sampling=hot, seed=range(18, 10, -1))
    assert [r.tokens for r in results] == [r.tokens for r in again][::-1]
    assert all(r.tokens != g.tokens for r, g in zip(results, plain_results(), strict=True))
    drafted = generate(
        tiny_pair("dflash2"), prompts[:3], draft_tokens=7, max_new_tokens=1, sampling=hot, seed=11
    )
    assert [r.tokens for r in drafted] == [r.tokens[:1] for r in results[:3]]


# --- results ---------------------------------------------------------------------------------


def test_origins_and_acceptance_by_hand():
    rounds = [Round(7, 7, 3, 4), Round(7, 7, 7, 8), Round(7, 3, 2, 1), Round(7, 0, 0, 1)]
    result = Generation([0] * 15, None, "length", rounds, 7, "non_causal")
    draft, own = [Origin.DRAFT], [Origin.CORRECTION]
    assert result.origins == (
        [Origin.PROMPT]
        + draft * 3 + own
        + draft * 7 + [Origin.BONUS]
        + draft  # of two accepted, the first was a stop
        + [Origin.PLAIN]
    )  # fmt: skip
    assert result.acceptance_length == pytest.approx((4 + 8 + 3) / 3)
    shares = accepted_per_position(rounds, 7)
    np.testing.assert_allclose(shares, [1, 1, 2 / 3, 0.5, 0.5, 0.5, 0.5])
    assert np.isnan(accepted_per_position([Round(0, 0, 0, 1)], 1)[0])


def test_texts_and_token_ids_are_both_prompts(accepting):
    pair = stopping_at(accepting.pair, accepting.pair.target.vocab_size - 1)
    texts = [" ".join(map(str, prompt)) for prompt in accepting.prompts]
    mixed = [*texts[:2], *accepting.prompts[2:]]
    results = generate(pair, mixed, draft_tokens=accepting.draft_tokens, max_new_tokens=9)
    assert [r.tokens for r in results] == [text[:9] for text in accepting.texts]


# --- compilations and transfers --------------------------------------------------------------


def test_one_compilation_per_phase_whatever_the_rows_hold(accepting):
    """Lengths, budgets, seeds, temperatures, accepted counts, stop ids: arrays, all of them."""
    pair, k = stopping_at(accepting.pair, 1), accepting.draft_tokens
    rows, vocabulary = len(accepting.prompts), pair.target.vocab_size
    rng = np.random.default_rng(0)
    generate(pair, accepting.prompts, draft_tokens=k, max_new_tokens=3)
    before = prefill_prompts._cache_size(), decode._cache_size()
    assert min(before) > 0
    for longest, budget, temperature in ((3, 1, 0.0), (60, 30, 0.0), (130, 64, 0.9), (256, 7, 0.1)):
        lengths = [longest, *rng.integers(1, longest, rows - 1)]
        prompts = [rng.integers(vocabulary, size=length).tolist() for length in lengths]
        generate(
            stopping_at(pair, *rng.integers(vocabulary, size=2).tolist()),
            prompts,
            draft_tokens=k,
            max_new_tokens=budget,
            sampling=Sampling(temperature),
            seed=int(budget),
        )
    assert (prefill_prompts._cache_size(), decode._cache_size()) == before


def test_a_stated_context_is_one_compilation_for_all_lengths():
    """Prompts of other buckets, up to the last token that fits; the text is the usual one."""
    short, long = tiny.prompts(2, longest=259)

    def text(prompt, budget, **kwargs):
        return generate(
            plain_pair(), prompt, draft_tokens=0, max_new_tokens=budget, **kwargs
        )[0].tokens  # fmt: skip

    text(short, 64, max_context=300)
    before = prefill_prompts._cache_size(), decode._cache_size()
    stated = text(long, 41, max_context=300)
    assert (prefill_prompts._cache_size(), decode._cache_size()) == before
    assert stated == text(long, 41) and len(stated) == 41
    assert (prefill_prompts._cache_size(), decode._cache_size()) != before  # larger buckets


def test_nothing_leaves_the_device_inside_a_generation(accepting):
    def job():
        return prepare(
            accepting.endless, accepting.prompts, draft_tokens=accepting.draft_tokens,
            max_new_tokens=accepting.new,
        )  # fmt: skip

    ready = job()
    jax.block_until_ready(ready.decode(ready.prefill()))  # compiled before the guard
    ready = job()
    with jax.transfer_guard("disallow"):
        _, progress = jax.block_until_ready(ready.decode(ready.prefill()))
    assert np.asarray(progress.emitted).tolist() == [accepting.new] * len(accepting.prompts)
    # The guard does guard: a budget that is still on the host has to be brought over.
    ready = job()
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match="[Dd]isallowed"):
        ready._replace(budget=np.asarray(ready.budget)).decode(ready.prefill())


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts: got 0"),
        ([[]], "prompt 0 is empty"),
        ([[1], []], "prompt 1 is empty"),
        ([[1, tiny.VOCAB]], "prompt 0, position 1: token id 64, expected 0..63"),
        ([[1], [2, 3, -1]], "prompt 1, position 2: token id -1"),
        ([[1]] * 9, "prompts: got 9, expected 1..8"),
        ("text", "no tokenizer"),
    ],
)
def test_prompts_that_are_refused(prompts, message):
    with pytest.raises(ValueError, match=message):
        generate(tiny_pair("dflash"), prompts)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(draft_tokens=16), "draft_tokens: got 16, expected 1..15"),
        (dict(draft_tokens=-1), "draft_tokens: got -1"),
        (dict(max_new_tokens=0), "max_new_tokens: got 0"),
        (dict(min_new_tokens=-1), "min_new_tokens: got -1, expected 0..128"),
        (dict(max_new_tokens=4, min_new_tokens=5), "min_new_tokens: got 5, expected 0..4"),
        (dict(sampling=[Sampling()] * 2), "sampling: got 2 values for 1 prompts"),
        (dict(seed=[1, 2]), "seed: got 2 values for 1 prompts"),
        (dict(max_new_tokens=9, max_context=10), "max_context: got 10, expected at least 11"),
    ],
)
def test_arguments_that_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        generate(tiny_pair("dflash"), [[1, 2]], **kwargs)


def test_drafting_without_a_draft_is_refused():
    with pytest.raises(ValueError, match="draft_tokens: got 3 without a draft"):
        generate(plain_pair(), [[1, 2]], draft_tokens=3)


def test_the_default_width_is_the_trained_block():
    assert prepare(tiny_pair("dflash"), [[1]]).spec.draft_tokens == tiny.DFLASH.block_size - 1
    assert prepare(plain_pair(), [[1]]).spec.draft_tokens == 0
    wide = dataclasses.replace(tiny_pair("dflash2"), draft=dataclasses.replace(
        tiny.DFLASH2, block_size=32
    ))  # fmt: skip
    assert prepare(wide, [[1]]).spec.draft_tokens == 15
