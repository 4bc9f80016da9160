"""Requests that end inside an accepted block: a fitted DFlash draft, whole blocks accepted."""

import functools

import numpy as np
import pytest

from dflash_jax import Engine
from tests.decoding.test_generate import accepted_inside, ending, load_trace, stopping_at


@functools.cache
def trace_engine(trace):
    longest = max(map(len, trace.prompts))
    return Engine(
        trace.endless, max_rows=3, draft_tokens=trace.draft_tokens, max_context=longest + trace.new
    )


@pytest.fixture
def trace(fixtures_dir):
    return load_trace(fixtures_dir, "mid_dense_v1")


@pytest.fixture
def engine(trace):
    engine = trace_engine(trace)
    assert engine.idle
    return engine


def serve(engine, trace, **kwargs):
    """All prompts of the trace, ended."""
    kwargs = dict(max_new_tokens=trace.new) | kwargs
    requests = [engine.submit(prompt, **kwargs) for prompt in trace.prompts]
    engine.run()
    return requests


def assert_state_ends_with(engine, request):
    """Some row has processed all tokens but the last, which is its anchor, and counted them all."""
    state = engine.batch.state
    counted = np.asarray(state.counts.output).sum(axis=1).tolist()
    ends = zip(state.frontier.tolist(), state.anchor.tolist(), counted, strict=True)
    count = len(request.tokens)
    assert (len(request.prompt) + count - 1, request.tokens[-1], count) in list(ends)


def test_tokens_and_rounds_equal_the_reference(engine, trace):
    for row, request in enumerate(serve(engine, trace)):
        assert request.tokens == trace.texts[row]
        assert [r.committed for r in request.rounds] == trace.lengths[row]
        # DFlash drafts no more columns than are verified.
        assert all(r.proposed == r.verified for r in request.rounds)


def test_budgets_give_exactly_as_many_tokens_and_go_on_from_there(engine, trace):
    more = 7
    for budget in range(1, 21):
        requests = serve(engine, trace, max_new_tokens=budget)
        for text, request in zip(trace.texts, requests, strict=True):
            assert (request.tokens, request.finish_reason) == (text[:budget], "length")
            assert sum(r.committed for r in request.rounds) == budget - 1
        last = requests[-1]
        assert_state_ends_with(engine, last)
        engine.extend(last, more)
        engine.run()
        assert last.tokens == trace.texts[-1][: budget + more]
        assert_state_ends_with(engine, last)


def test_a_stop_id_inside_a_block_ends_the_text_there(engine, trace):
    whole, cut = serve(engine, trace), 0
    for row, text in enumerate(trace.texts):
        firsts = [at for at in accepted_inside(whole[row]) if text.index(text[at]) == at]
        for at in firsts[:3]:
            for budget in (at, at + 1, at + 2, trace.new):
                if not budget:
                    continue
                requests = serve(engine, trace, eos_ids=[text[at]], max_new_tokens=budget)
                for expected, request in zip(trace.texts, requests, strict=True):
                    tokens, reason = ending(expected, (text[at],), budget)
                    assert (request.tokens, request.finish_reason) == (tokens, reason)
                    shown = tokens[:-1] if reason == "stop" else tokens
                    assert request.text == " ".join(map(str, shown))
            last = requests[row].rounds[-1]
            cut += last.committed < last.accepted + 1
    assert cut >= 2, "no stop came inside an accepted block"


def test_a_stop_string_over_token_borders_inside_a_block(engine, trace):
    """ " 12 7 " is complete with the blank before the third number: N ends there, text before."""
    whole, cut = serve(engine, trace), 0
    for row, text in enumerate(trace.texts):
        for at in accepted_inside(whole[row])[:4]:
            if at + 1 >= len(text):
                continue
            stop = f" {text[at - 1]} {text[at]} "
            shown = " ".join(map(str, text))
            first = shown.find(stop)
            if first < 0:
                continue
            request = engine.submit(trace.prompts[row], max_new_tokens=trace.new, stop=stop)
            engine.run()
            count = len(shown[: first + len(stop)].split()) + 1
            assert (request.tokens, request.finish_reason) == (text[:count], "stop")
            assert request.text == shown[:first]
            assert_state_ends_with(engine, request)
            last = request.rounds[-1]
            cut += last.committed < last.accepted + 1
    assert cut >= 1, "no stop string was completed inside an accepted block"


def test_a_stop_id_as_the_first_token_needs_no_round(engine, trace):
    first = trace.texts[0][0]
    request = engine.submit(trace.prompts[0], max_new_tokens=9, eos_ids=[first])
    engine.run()
    assert (request.tokens, request.text, request.rounds) == ([first], "", [])
    assert request.finish_reason == "stop"


def test_the_pairs_own_stop_ids_are_the_default(trace):
    pair = stopping_at(trace.pair, trace.texts[0][3])
    engine = Engine(
        pair, max_rows=3, draft_tokens=trace.draft_tokens,
        max_context=trace_engine(trace).max_context,
    )  # fmt: skip
    request = engine.submit(trace.prompts[0], max_new_tokens=trace.new)
    ignoring = engine.submit(trace.prompts[0], max_new_tokens=trace.new, ignore_eos=True)
    engine.run()
    assert request.tokens == ending(trace.texts[0], (trace.texts[0][3],), trace.new)[0]
    assert ignoring.tokens == trace.texts[0]
    assert np.isfinite(ignoring.statistics.acceptance_length)
