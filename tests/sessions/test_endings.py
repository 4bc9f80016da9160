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
    for budget in (1, 2, 3, 5, 8, 9, 13, 20):
        row = budget % len(trace.prompts)
        text = trace.texts[row]
        request = engine.submit(trace.prompts[row], max_new_tokens=budget)
        engine.run()
        assert (request.tokens, request.finish_reason) == (text[:budget], "length")
        assert sum(r.committed for r in request.rounds) == budget - 1
        assert_state_ends_with(engine, request)
        engine.extend(request, more)
        engine.run()
        assert request.tokens == text[: budget + more]
        assert_state_ends_with(engine, request)


def test_a_stop_id_inside_a_block_ends_the_text_there(engine, trace):
    """Ids that greedy text has and the draft proposes, at, before and after the budget's end."""
    whole, requests = serve(engine, trace), []
    for row, text in enumerate(trace.texts):
        firsts = [at for at in accepted_inside(whole[row]) if text.index(text[at]) == at]
        for at in firsts[:2]:
            for budget in (at, at + 1, at + 2, trace.new):
                request = engine.submit(
                    trace.prompts[row], eos_ids=[text[at]], max_new_tokens=budget
                )
                requests.append((request, *ending(text, (text[at],), budget)))
    engine.run()
    for request, tokens, reason in requests:
        assert (request.tokens, request.finish_reason) == (tokens, reason)
        shown = tokens[:-1] if reason == "stop" else tokens
        assert request.text == " ".join(map(str, shown))
    lasts = [request.rounds[-1] for request, *_ in requests if request.rounds]
    cut = sum(last.committed < last.accepted + 1 for last in lasts)
    assert cut >= 2, "no stop came inside an accepted block"


def test_a_stop_string_over_token_borders_inside_a_block(engine, trace):
    """ " 12 7 " is complete with the blank before the third number: N ends there, text before."""
    whole, cut = serve(engine, trace), 0
    for row, text in enumerate(trace.texts):
        for at in [at for at in accepted_inside(whole[row]) if at > 1][:2]:
            shown = " ".join(map(str, text))
            stop = f" {text[at - 1]} {text[at]} "
            first = shown.find(stop)
            if first < 0:  # the text ends with these two
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
