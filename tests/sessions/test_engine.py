"""The engine: alone or in company, in any order, cancelled, failing, extended; nothing compiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_jax import Engine, Sampling, generate
from tests.decoding import tiny
from tests.sessions.letters import TABLE, Letters
from tests.sessions.requests import (
    CONTEXT,
    K,
    cancel_when_due,
    new_engine,
    outcome,
    pair,
    pool,
    random_request,
    run_alone,
    run_together,
    shared,
    submit,
)


@pytest.fixture
def engine():
    """The shared engine, with nothing left to do."""
    engine = shared()
    assert engine.idle
    yield engine
    engine.run()


@pytest.fixture
def compilations():
    """Names of the programs compiled during the test, however small."""
    seen = []

    def listen(event, _, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(details.get("fun_name"))

    shared()
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


# --- alone = in company ----------------------------------------------------------------------


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.slow)])
def test_company_changes_nothing(engine, compilations, count):
    """Tokens, text, reason and every round's counts; and nothing is compiled on the way."""
    rng = np.random.default_rng(count)
    batch = [random_request(rng) for _ in range(count)]
    together = [outcome(request) for request in run_together(engine, batch)]
    alone = [outcome(run_alone(engine, wanted)) for wanted in batch]
    for index, (a, b) in enumerate(zip(together, alone, strict=True)):
        assert a == b, f"request {index}: {batch[index]}"
    assert {reason for _, _, reason, _ in alone} == {"stop", "length", "cancelled"}
    assert any(r.accepted for *_, counts in alone for r in counts)
    assert compilations == []


def test_the_engine_gives_what_generate_gives(engine):
    """Three rows of the whole-generation loop: other shapes, the same tokens and rounds."""
    prompts, hot = tiny.prompts(8)[2:5], Sampling(temperature=0.8)
    for sampling in (Sampling(), hot):
        results = generate(
            dataclasses.replace(pair(), tokenizer=None), prompts, draft_tokens=K,
            max_new_tokens=50, sampling=sampling, seed=[7, 8, 9],
        )  # fmt: skip
        requests = [
            engine.submit(p, max_new_tokens=50, sampling=sampling, seed=7 + i, ignore_eos=True)
            for i, p in enumerate(prompts)
        ]
        engine.run()
        for result, request in zip(results, requests, strict=True):
            assert (request.tokens, request.rounds) == (result.tokens, result.rounds)
            assert request.text == Letters().decode(result.tokens)
            assert request.statistics.acceptance_length == result.acceptance_length


moves = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 11)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("stream"), st.integers(0, 30)),
    ),
    max_size=30,
)


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(moves)
def test_any_order_of_events(moves):
    engine = shared()
    wanted, alone = pool()
    made, cancelled, ended = [], set(), []
    for move, number in moves:
        if move == "submit":
            made.append((number, submit(engine, wanted[number])))
        elif move == "step":
            for _ in range(number):
                ended += engine.step()
        elif made:
            request = made[number % len(made)][1]
            if move == "cancel" and not request.finished:
                cancelled.add(request)
                engine.cancel(request)
                assert request.finish_reason == "cancelled"
            elif move == "stream":
                pieces = engine.stream(request)
                text = next(pieces, "")
                assert request.text.startswith(text)
    ended += engine.run()
    assert engine.idle and len(set(ended)) == len(ended)
    for number, request in made:
        tokens, text, reason, counts = alone[number]
        if request in cancelled:
            assert request.tokens == tokens[: len(request.tokens)]
            assert request.text == Letters().decode(request.tokens)[: len(request.text)]
            assert request.rounds == counts[: len(request.rounds)]
        else:
            assert outcome(request) == (tokens, text, reason, counts)


def test_waiting_requests_start_in_order_and_a_long_prompt_starves_nobody(engine):
    """The ninth waits for a row; while ten chunks of one prompt go in, the others decode."""
    short = [
        engine.submit([index], max_new_tokens=40, ignore_eos=True, seed=0) for index in range(7)
    ]
    for _ in range(7):
        engine.step()
    long = engine.submit(list(range(64)) * 9 + [3], max_new_tokens=3, ignore_eos=True)
    waiting = engine.submit([5], max_new_tokens=1, ignore_eos=True)
    for _ in range(9):
        before = [len(request.tokens) for request in short]
        engine.step()
        assert not long.tokens and not waiting.tokens
        assert all(len(r.tokens) > n or r.finished for r, n in zip(short, before, strict=True))
    engine.step()
    assert long.tokens  # its tenth chunk chose the first token and a round followed
    order = engine.run()
    assert waiting.finished and order.index(waiting) > 0


def test_a_row_full_of_nonsense_serves_like_a_new_one(engine):
    """NaN in every array and pool, counters anywhere: the next request sees none of it."""
    wanted, alone = pool()

    def poison(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return np.full(leaf.shape, np.nan, leaf.dtype)
        return np.full(leaf.shape, 123, leaf.dtype)

    batch = engine.batch
    tables = batch.state.target.kv.block_table
    state = jax.tree.map(poison, batch.state)
    kv = state.target.kv._replace(block_table=tables)
    batch.state = jax.device_put(state._replace(target=state.target._replace(kv=kv)))
    # Beside rows still full of it, then everywhere, shorter prompts after longer ones.
    for order in (range(3), sorted(range(12), key=lambda i: -len(wanted[i]["prompt"]))):
        requests = [(i, submit(engine, wanted[i])) for i in order]
        engine.run()
        for index, request in requests:
            assert outcome(request) == alone[index]


# --- where requests end ----------------------------------------------------------------------


@pytest.mark.parametrize("first", [1, 2, 5, 8, 9, 14])
def test_a_budget_extended_is_one_larger_budget(engine, first):
    kwargs = dict(max_new_tokens=first, ignore_eos=True, seed=1)
    prompts = tiny.prompts(3)
    whole = [engine.submit(p, **{**kwargs, "max_new_tokens": first + 9}) for p in prompts]
    engine.run()
    parts = [engine.submit(p, **kwargs) for p in prompts]
    engine.run()
    for request, one in zip(parts, whole, strict=True):
        assert request.tokens == one.tokens[:first]
        assert request.text == Letters().decode(request.tokens)
        row = engine.schedule.resting_seat(request).row
        state = engine.batch.state
        assert np.asarray(state.frontier)[row] == len(request.prompt) + first - 1
        assert np.asarray(state.anchor)[row] == request.tokens[-1]
        assert np.asarray(state.counts.output)[row].sum() == first
        engine.extend(request, 9)
    engine.run()
    assert [(r.tokens, r.text) for r in parts] == [(r.tokens, r.text) for r in whole]
    assert all(r.finish_reason == "length" for r in parts)


def test_what_cannot_be_extended_is_refused(engine):
    request = engine.submit([1, 2], max_new_tokens=2, ignore_eos=True)
    with pytest.raises(ValueError, match="extend: .* running"):
        engine.extend(request, 1)
    engine.run()
    with pytest.raises(ValueError, match="more: got 0"):
        engine.extend(request, 0)
    with pytest.raises(ValueError, match=f"need {CONTEXT + 1} positions"):
        engine.extend(request, CONTEXT - 3)
    for _ in range(8):
        engine.submit([1], max_new_tokens=1)
    engine.run()
    with pytest.raises(ValueError, match="whose row no other request has taken"):
        engine.extend(request, 1)


def test_stop_ids_and_strings_end_where_the_text_says(engine):
    """Any token of a greedy text as the stop id, and the text of any as the stop string."""
    (plain,) = [engine.submit([9, 4], max_new_tokens=24, ignore_eos=True)]
    engine.run()
    assert plain.finish_reason == "length"
    requests = []
    for at, token in enumerate(plain.tokens):
        end = plain.tokens.index(token) + 1
        by_id = engine.submit([9, 4], max_new_tokens=24, eos_ids=[token])
        requests.append((by_id, end, Letters().decode(plain.tokens[: end - 1])))
        piece = TABLE[token].decode(errors="replace")
        if at % 2 == 0 and "\ufffd" not in piece:
            by_text = engine.submit([9, 4], max_new_tokens=24, ignore_eos=True, stop=piece)
            requests.append((by_text, None, plain.text[: plain.text.index(piece)]))
    engine.run()
    for request, end, text in requests:
        assert (request.finish_reason, request.text) == ("stop", text)
        assert request.tokens == plain.tokens[: len(request.tokens)]
        assert end is None or len(request.tokens) == end
        assert sum(r.committed for r in request.rounds) == len(request.tokens) - 1
    first = requests[0][0]
    assert (first.tokens, first.text, first.rounds) == (plain.tokens[:1], "", [])


def test_min_new_tokens_counts_tokens(engine):
    """The tokens that greedy text begins with are stop ids: none comes before its time."""
    free = engine.submit([3], max_new_tokens=20, ignore_eos=True)
    engine.run()
    stops = list(dict.fromkeys(free.tokens))[:8]
    for least in (0, 1, 6, 20):
        request = engine.submit([3], max_new_tokens=20, min_new_tokens=least, eos_ids=stops)
        engine.run()
        assert not set(request.tokens[:least]) & set(stops)
        ended_early = len(request.tokens) > least and request.finish_reason == "stop"
        assert ended_early or len(request.tokens) == 20
        assert (least == 0) == (request.tokens == free.tokens[:1])
    # A stop string that ends too early is passed over; one right after counts.
    text = engine.submit([9, 4], max_new_tokens=24, ignore_eos=True)
    engine.run()
    piece = TABLE[text.tokens[2]].decode(errors="replace")
    late = engine.submit([9, 4], max_new_tokens=24, min_new_tokens=24, ignore_eos=True, stop=piece)
    engine.run()
    assert outcome(late) == outcome(text)


def test_streams_give_the_text_piece_by_piece(engine):
    told = []
    one = engine.submit([1, 2, 3], max_new_tokens=30, ignore_eos=True, on_text=told.append)
    two = engine.submit([4], max_new_tokens=30, sampling=Sampling(0.9), seed=3, stop=["zz"])
    pieces = list(engine.stream(one))
    assert len(pieces) > 5 and all(pieces)
    assert "".join(pieces) == "".join(told) == one.text == Letters().decode(one.tokens)
    assert two.tokens  # it went on meanwhile
    assert "".join(engine.stream(two)) == two.text
    assert "".join(engine.stream(one)) == one.text  # again, from the beginning


# --- cancellation and errors -----------------------------------------------------------------


def test_cancellation_at_every_moment(engine):
    wanted, alone = pool()
    queued = [submit(engine, wanted[0]) for _ in range(9)]
    engine.cancel(queued[8])  # waiting, before any step
    engine.cancel(queued[8])  # twice is once
    assert (queued[8].finish_reason, queued[8].tokens) == ("cancelled", [])
    prompt = engine.submit(list(range(64)) * 3, max_new_tokens=5)
    for request in queued[1:8]:
        engine.cancel(request)
    ended = engine.step()
    assert set(ended) >= set(queued[1:9])
    while not engine.schedule.seat_of(prompt).prefilled:
        engine.step()
    engine.cancel(prompt)  # between two chunks of its prompt
    assert prompt.tokens == [] and engine.schedule.seat_of(prompt) is None
    engine.run()
    assert outcome(queued[0]) == alone[0]
    engine.cancel(queued[0])  # after its end: as it was
    assert outcome(queued[0]) == alone[0]
    with pytest.raises(ValueError, match="not submitted to this engine"):
        engine.cancel(dataclasses.replace(queued[0]))


def test_cancellation_from_inside_a_step(engine):
    """From callbacks, also one's own, and while another row's text is being made."""
    wanted, alone = pool()
    kwargs = dict(max_new_tokens=30, ignore_eos=True)
    other = engine.submit([8], **kwargs)
    own = engine.submit([9], on_text=lambda _: engine.cancel(own), **kwargs)
    killer = engine.submit([7], on_text=lambda _: engine.cancel(other), **kwargs)
    neighbour = submit(engine, wanted[1])
    engine.run()
    assert own.finish_reason == other.finish_reason == "cancelled"
    assert 1 <= len(own.tokens) < 30 and len(other.tokens) < 30
    assert (killer.finish_reason, outcome(neighbour)) == ("length", alone[1])

    class Meddling(Letters):
        def decode(self, ids):
            if len(victim.tokens) >= 3 and not victim.finished:
                engine.cancel(victim)  # in the middle of the round
            return super().decode(ids)

    tokenizer = engine.schedule.tokenizer
    victim = engine.submit([6], **kwargs)
    engine.step()
    engine.schedule.tokenizer = Meddling()
    try:
        late = engine.submit([5], **kwargs)
        engine.run()
    finally:
        engine.schedule.tokenizer = tokenizer
    assert victim.finish_reason == "cancelled" and 3 <= len(victim.tokens) < 30
    assert late.finish_reason == "length"
    # A round that commits nothing is not counted.
    assert sum(r.committed for r in victim.rounds) == len(victim.tokens) - 1


class Brittle(Letters):
    def decode(self, ids):
        if len(ids) > 6:
            raise RuntimeError("no more text")
        return super().decode(ids)


def test_an_error_ends_one_request_alone(engine):
    wanted, alone = pool()

    def refuse(piece):
        raise OSError("the line is closed")

    # A request takes the tokenizer it finds when it moves into a row.
    broken = engine.submit([2, 3], max_new_tokens=30, ignore_eos=True)
    tokenizer = engine.schedule.tokenizer
    engine.schedule.tokenizer = Brittle()
    engine.step()
    engine.schedule.tokenizer = tokenizer
    deaf = engine.submit([2, 3], max_new_tokens=30, ignore_eos=True, on_text=refuse)
    greedy = engine.submit([3], max_new_tokens=2, ignore_eos=True, on_text=lambda _: engine.step())
    neighbours = [(i, submit(engine, wanted[i])) for i in range(4)]
    ended = engine.run()
    assert {broken, deaf, greedy} <= set(ended) and len(ended) == 7
    for request, error in ((broken, "no more text"), (deaf, "line is closed"),
                           (greedy, "inside a step")):  # fmt: skip
        assert request.finish_reason == "error"
        assert error in str(request.error)
        with pytest.raises(type(request.error), match=error):
            list(engine.stream(request))
    assert 1 <= len(broken.tokens) < 30
    for index, request in neighbours:
        assert outcome(request) == alone[index]


# --- compilations and transfers --------------------------------------------------------------


def test_a_round_leaves_the_device_once(engine, monkeypatch):
    """And one array goes the other way: N. Both are asked for; nothing crosses unasked."""
    requests = [
        engine.submit(p, max_new_tokens=40, ignore_eos=True, sampling=Sampling(0.5 * (i % 2)))
        for i, p in enumerate(tiny.prompts(8))
    ]
    while not all(request.tokens for request in requests):
        engine.step()
    engine.step()
    out, into = [], []
    get, put = jax.device_get, jax.device_put
    monkeypatch.setattr(jax, "device_get", lambda x: (out.append(x.shape), get(x))[1])
    monkeypatch.setattr(jax, "device_put", lambda x: (into.append(x.shape), put(x))[1])
    with jax.transfer_guard("disallow"):
        for _ in range(5):
            engine.step()
    assert out == [(8, K + 2)] * 5
    assert into == [(8,)] * 5
    # The guard does guard: N that nobody sent over explicitly.
    engine.batch.speculate(np.full(8, -1, np.int32))
    scratch = engine.batch._scratch
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match="[Dd]isallowed"):
        engine.batch._programs.commit(
            engine.batch.state, scratch.verified, scratch.accepted, np.zeros(8, np.int32)
        )


def test_compiled_before_the_first_request_and_once():
    """Each program is announced; a second engine of the same shapes finds them made."""
    shared()
    told = []
    second = new_engine(report=lambda *line: told.append(line))
    names = [name for name, *_ in told]
    assert names == [
        "install", "prefill", "choose_anchor", "speculate", "commit",
        "catch_up", "dense_of", "read_pages", "write_pages",
    ]  # fmt: skip
    assert [line[2:] for line in told] == [(i, 9) for i in range(1, 10)]
    assert second.idle and second.step() == [] and second.run() == []
    assert "8 rows of 704 tokens, 7 draft tokens" in second.describe()


# --- requests --------------------------------------------------------------------------------


def test_unseeded_requests_differ_and_can_be_repeated(engine):
    hot = dict(max_new_tokens=20, sampling=Sampling(1.2), ignore_eos=True)
    several = [engine.submit([1, 2], **hot) for _ in range(4)]
    engine.run()
    assert len({tuple(request.tokens) for request in several}) == 4
    assert len({request.seed for request in several}) == 4
    again = engine.submit([1, 2], seed=several[2].seed, **hot)
    engine.run()
    assert again.tokens == several[2].tokens


REFUSED = [
    (dict(prompt=[]), "prompt is empty"),
    (dict(prompt=[1, 64]), "prompt, position 1: token id 64, expected 0..63"),
    (dict(max_new_tokens=0), "max_new_tokens: got 0, expected a whole number >= 1"),
    (dict(max_new_tokens=1.5), "max_new_tokens: got 1.5"),
    (dict(min_new_tokens=-1), "min_new_tokens: got -1, expected a whole number in 0..5"),
    (dict(min_new_tokens=6), "min_new_tokens: got 6"),
    (dict(seed=-1), "seed: got -1, expected a whole number in 0..4294967295"),
    (dict(seed=2**32), "seed: got 4294967296"),
    (dict(stop=""), "stop: got '', expected non-empty strings"),
    (dict(stop=["a", 3]), "stop: got 3"),
    (dict(eos_ids=[-1]), "eos_ids: got -1"),
    (dict(eos_ids=[64]), "eos_ids: got 64, expected 0..63"),
    (dict(eos_ids=list(range(9))), "eos_ids: got 9, but max_stop_ids is 8"),
    (dict(ignore_eos=1), "ignore_eos: got 1"),
    (dict(on_text=3), "on_text: got 3"),
    (dict(sampling=0.5), "sampling: got 0.5, expected a Sampling"),
    (
        dict(prompt=[1] * 700),
        "prompt of 700 tokens and max_new_tokens 5 need 705 positions, but max_context is 704",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED)
def test_requests_that_are_refused(engine, wrong, message):
    with pytest.raises(ValueError, match=message):
        engine.submit(**{"prompt": [1], "max_new_tokens": 5, **wrong})
    assert engine.idle


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(max_rows=0), "max_rows: got 0, expected 1..8"),
        (dict(max_rows=9), "max_rows: got 9"),
        (dict(max_context=1), "max_context: got 1, expected 2..4096"),
        (dict(max_context=5000), "max_context: got 5000"),
        (dict(prefill_chunk=0), "prefill_chunk: got 0"),
        (dict(max_stop_ids=1), "max_stop_ids: got 1, expected 2..64"),
        (dict(draft_tokens=16), "draft_tokens: got 16"),
    ],
)
def test_engines_that_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Engine(pair(), **wrong)


def test_statistics_add_up(engine):
    request = run_alone(engine, {**random_request(np.random.default_rng(0)), "cancel_at": None})
    figures = request.statistics
    assert figures.rounds == len(request.rounds) > 0
    assert figures.committed == len(request.tokens) - 1
    assert figures.proposed == K * figures.rounds >= figures.verified >= figures.accepted
    assert len(figures.accepted_per_position) == K == request.draft_tokens
    assert request.block_attention == pair().draft.causality.value
    assert repr(request).endswith(f"{request.finish_reason})")


def test_the_last_positions_of_a_context_are_used(engine):
    request = engine.submit([1] * (CONTEXT - 20), max_new_tokens=20, ignore_eos=True)
    engine.run()
    assert (len(request.tokens), request.finish_reason) == (20, "length")
    cancel_when_due(engine, request, {"cancel_at": 1})  # an ended one stays as it is
    assert request.finish_reason == "length"
