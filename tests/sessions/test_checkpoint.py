"""Continuing from a checkpoint is going on: tokens, rounds and every array, bit for bit."""

import dataclasses
import gc
import json
import subprocess
import sys

import numpy as np
import pytest

from dflash_jax import Checkpoint, Engine, Sampling
from dflash_jax.io.fingerprint import fingerprint
from dflash_jax.sessions.checkpoint import Record, RestoreError
from tests.decoding import tiny
from tests.sessions import small
from tests.sessions.small import assert_same_parts, final_parts, finish, said, shared

NEW = 3 * tiny.WINDOW  # from a prompt of one token: frontiers 1 to three rings


@pytest.fixture(params=list(small.DRAFTS))
def engine(request):
    """An idle engine for each kind of draft."""
    engine = shared(request.param)
    assert engine.idle
    yield engine
    engine.run()


def uninterrupted(engine, **wanted):
    """What the request publishes, and every array at its end, without any checkpoint."""
    request = finish(engine, engine.submit(**wanted))
    return said(request), final_parts(engine, request)


def checkpoints(engine, **wanted) -> list:
    """One after every step of a request."""
    request = engine.submit(**wanted)
    taken = []
    while not request.finished:
        engine.step()
        if not request.finished:
            taken.append(engine.checkpoint(request))
    return taken


@pytest.mark.parametrize("sampling", [Sampling(), small.HOT], ids=["greedy", "sampled"])
@pytest.mark.parametrize("way", ["device", "host", "saved"])
def test_going_on_is_going_on(engine, sampling, way, tmp_path):
    """At every frontier of a generation that wraps the rings twice, rejected rounds included."""
    wanted = dict(prompt=[7], sampling=sampling, seed=5, max_new_tokens=NEW, ignore_eos=True)
    whole, arrays = uninterrupted(engine, **wanted)
    taken = checkpoints(engine, **wanted)
    # A step chooses the first token and has its first round: a budget of one stops in between.
    request = finish(engine, engine.submit(**(wanted | dict(max_new_tokens=1))))
    taken.insert(0, engine.checkpoint(request))
    frontiers = [one.frontier for one in taken]
    assert frontiers[0] == 1 and frontiers[-1] >= NEW - 1 - small.K
    assert len(set(frontiers)) >= NEW // (small.K + 1)
    if engine.spec.draft is not None:
        accepted = [r.accepted for r in whole[3]]
        assert 0 in accepted  # rejected rounds
    if way == "saved":  # the file is the costly part
        taken = taken[:: max(1, len(taken) // 4)]
    for checkpoint in taken:
        before = len(checkpoint.record.tokens)
        if way == "host":
            assert checkpoint.to_host().tier == "host"
        elif way == "saved":
            checkpoint.save(tmp_path / str(checkpoint.frontier))
            checkpoint = Checkpoint.load(tmp_path / str(checkpoint.frontier))
        again = finish(engine, engine.restore(checkpoint, max_new_tokens=NEW))
        assert said(again) == whole
        # No prefill: not one prompt token ran through the target again.
        assert (again.restored, again.prefilled) == (checkpoint.frontier, 0)
        assert len(again.rounds) > len(checkpoint.record.rounds) or before == NEW
        assert_same_parts(final_parts(engine, again), arrays)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 24, 25])
def test_in_the_middle_of_a_prompt(engine, length):
    """At its turn, before its first token: borders of pages, rings and chunks."""
    prompt = tiny.prompts(2)[1][:length] + [3, 4, 5]
    request = engine.submit(prompt, seed=1, max_new_tokens=12, sampling=small.HOT)
    engine.schedule._turns = True  # as with checkpoint_turns, but nothing is kept
    kept, engine.contexts.keep = [], lambda turn: kept.append(turn)
    request.suffix_tokens = 3
    try:
        whole = said(finish(engine, request))
    finally:
        engine.schedule._turns = False
        del engine.contexts.keep
    turn = kept[0]
    assert (turn.frontier, turn.record.tokens) == (length, ())
    again = finish(engine, engine.restore(turn))
    assert said(again) == whole
    assert (again.restored, again.prefilled) == (length, 3)
    other = finish(engine, engine.restore(turn, suffix=[9, 9]))
    assert other.prompt == prompt[:length] + [9, 9] and other.prefilled == 2


def test_restored_into_another_row_and_into_two_at_once(engine):
    wanted = dict(prompt=[7, 8, 9], seed=2, sampling=small.HOT, max_new_tokens=20, ignore_eos=True)
    whole, arrays = uninterrupted(engine, **wanted)
    request = engine.submit(**wanted)
    while len(request.tokens) < 6:
        engine.step()
    checkpoint = engine.checkpoint(request)
    twins = [engine.restore(checkpoint) for _ in range(3)]  # beside their parent: four rows
    engine.run()
    for one in (request, *twins):
        assert said(one) == whole
        assert_same_parts(final_parts(engine, one), arrays)
    # Rounds have donated the state again and again since: it still restores, three times.
    for _ in range(3):
        assert said(finish(engine, engine.restore(checkpoint))) == whole


def test_children_change_nothing(engine):
    """Five generations of forks with seeds of their own; the parents' checkpoints stay."""
    wanted = dict(prompt=[1, 2, 3, 4], sampling=small.HOT, max_new_tokens=40, ignore_eos=True)
    whole, arrays = uninterrupted(engine, seed=1, **wanted)
    first = parent = engine.submit(seed=1, **wanted)
    line, images = [], []
    for generation in range(5):
        goal = 4 * (generation + 1)
        while len(parent.tokens) < goal:
            engine.step()
        checkpoint = engine.checkpoint(parent)
        images.append((checkpoint, checkpoint.parts()))
        child = engine.fork(parent, seed=100 + generation)
        if generation:
            engine.cancel(parent)  # an ended parent takes no page of its children with it
        line.append((parent, child))
        parent = child
    engine.run()
    assert said(first) == whole
    assert_same_parts(final_parts(engine, first), arrays)
    for parent, child in line:
        shared_tokens = min(len(parent.tokens), child.restored - 3)
        assert child.tokens[:shared_tokens] == parent.tokens[:shared_tokens]
    assert len({tuple(child.tokens) for _, child in line}) == 5
    for checkpoint, parts in images:
        assert_same_parts(checkpoint.parts(), parts)


def test_the_first_proposals_are_those_of_the_uninterrupted_run():
    """The draft's context came along: a wrong one would show in no token, only in acceptance."""
    for kind in ("dflash", "dflash2"):
        engine = shared(kind)
        seen = []
        speculate = engine.batch.speculate

        def listening(planned, seen=seen, speculate=speculate, engine=engine):
            egress = speculate(planned)
            records = engine.batch._scratch.verified.records
            # Raw keys of all columns: equal only where the proposals are equal too.
            seen.append(np.asarray(records.key)[:, planned >= 0].tobytes())
            return egress

        wanted = dict(prompt=[5, 6], max_new_tokens=24, ignore_eos=True)
        request = engine.submit(**wanted)
        while len(request.tokens) < 11:
            engine.step()
        checkpoint = engine.checkpoint(request)
        engine.batch.speculate = listening
        try:
            finish(engine, request)
            first, seen[:] = list(seen), []
            finish(engine, engine.restore(checkpoint.to_host()))
        finally:
            del engine.batch.speculate
        assert first and seen == first


def test_a_fork_shares_whole_pages():
    long = dataclasses.replace(small.pair("plain").target, max_position_embeddings=8192)
    pair = dataclasses.replace(small.pair("plain"), target=long)
    engine = Engine(pair, max_rows=2, max_context=4160, draft_tokens=0)
    prompt = np.random.default_rng(0).integers(tiny.VOCAB, size=4096 + 7).tolist()
    request = engine.submit(prompt, max_new_tokens=40, ignore_eos=True)
    while not request.tokens:
        engine.step()
    before = small.pages_of(engine)
    checkpoint = engine.checkpoint(request)
    assert small.pages_of(engine) == before  # not one page for a checkpoint
    child = engine.fork(request)
    engine.step()
    assert child.restored
    # 64 whole pages of 64 positions are shared; of its own the child has the one it writes to.
    assert small.pages_of(engine) - before == 1
    page = engine.batch.page_bytes()
    assert page == 2 * 64 * 16 * 4  # keys and values of one layer, one head of 16, float32
    engine.run()
    del checkpoint
    assert child.tokens == request.tokens


# --- controls, budgets, other draft widths ---------------------------------------------------


def test_controls_may_be_replaced(engine):
    wanted = dict(prompt=[3, 1], seed=4, max_new_tokens=8, ignore_eos=True)
    request = finish(engine, engine.submit(**wanted))
    at_end = engine.checkpoint(request)
    longer, _ = uninterrupted(engine, **(wanted | dict(max_new_tokens=20)))
    with pytest.raises(ValueError, match="max_new_tokens: 8, but .* has published 8"):
        engine.restore(at_end)
    more = finish(engine, engine.restore(at_end, max_new_tokens=20))
    assert (more.tokens, more.text) == (longer[0], longer[1])  # greedy
    hot = finish(engine, engine.restore(at_end, max_new_tokens=20, sampling=small.HOT, seed=1))
    assert hot.tokens[:8] == request.tokens and hot.tokens != more.tokens
    with pytest.raises(TypeError, match="tempreature"):
        engine.restore(at_end, tempreature=1.0)
    if engine.spec.draft_tokens:
        narrow = finish(engine, engine.restore(at_end, max_new_tokens=20, draft_tokens=1))
        assert narrow.tokens == more.tokens
        assert all(r.verified <= 1 for r in narrow.rounds[len(request.rounds) :])
        with pytest.raises(ValueError, match=r"draft_tokens: got 4, expected 0\.\.3"):
            engine.restore(at_end, max_new_tokens=20, draft_tokens=4)


def test_text_goes_on_in_mid_character():
    """A checkpoint between the two halves of a character; stop strings over the border too."""
    engine = shared("dflash2")
    wanted = dict(prompt=[40, 41], seed=8, sampling=Sampling(1.3), max_new_tokens=40)
    wanted |= dict(stop=("th", "!?"), ignore_eos=True)
    whole, _ = said(finish(engine, engine.submit(**wanted))), None
    pieces = []
    for checkpoint in checkpoints(engine, **wanted):
        again = engine.restore(checkpoint, on_text=pieces.append)
        finish(engine, again)
        assert said(again) == whole
        assert whole[1].endswith("".join(pieces))  # it is told only what is new
        pieces.clear()


# --- what has no state, and what does not belong ---------------------------------------------


def test_requests_without_a_state_are_refused(engine):
    request = engine.submit([1, 2], max_new_tokens=3, ignore_eos=True)
    with pytest.raises(ValueError, match="has no state"):
        engine.checkpoint(request)
    with pytest.raises(ValueError, match="no turn"):
        engine.checkpoint(request, turn=True)
    caught = []

    def inside(_):
        with pytest.raises(RuntimeError, match="inside a step"):
            engine.checkpoint(request)
        caught.append(True)

    told = engine.submit([3], max_new_tokens=2, ignore_eos=True, on_text=inside)
    engine.run()
    assert caught and told.error is None
    probe = finish(engine, engine.submit([1], max_new_tokens=9, ignore_eos=True))
    ended = finish(engine, engine.submit([1], max_new_tokens=9, eos_ids=probe.tokens[:1]))
    assert ended.finish_reason == "stop"
    with pytest.raises(ValueError, match="has no state: it waits or has ended"):
        engine.checkpoint(ended)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of the DFlash2 engine in mid-generation, on the host."""
    engine = shared("dflash2")
    request = engine.submit([7, 8, 9], max_new_tokens=30, ignore_eos=True)
    while len(request.tokens) < 12:
        engine.step()
    checkpoint = engine.checkpoint(request).to_host()
    engine.cancel(request)
    return checkpoint


def test_another_pair_is_refused_by_name(saved):
    other = dataclasses.replace(small.pair("dflash2"))
    params = dict(other.target_params)
    params["lm_head"] = {"weight": params["lm_head"]["weight"].at[3, 4].add(1e-3)}
    for change, part in (
        (dict(target_params=params), "target"),
        (dict(dtype="bfloat16"), "dtype"),
        (dict(draft_params=tiny.pair(tiny.DFLASH2, target=tiny.TARGET).draft_params), None),
    ):
        pair = dataclasses.replace(other, **change)
        ours = fingerprint(pair, True)
        differing = [name for name in ours if ours[name] != saved.record.fingerprint[name]]
        assert differing == ([part] if part else [])
    for kind in ("plain", "dflash"):
        with pytest.raises(RestoreError, match="^draft: the checkpoint is of .*, the engine has"):
            shared(kind).restore(saved)


def changed(saved, parts=None, **record) -> Checkpoint:
    return Checkpoint(dataclasses.replace(saved.record, **record), parts or saved.parts())


def test_every_part_is_needed(saved):
    """Dropped, misshapen, in another dtype, or covering other positions: refused by its name."""
    engine = shared("dflash2")
    parts = saved.parts()
    assert {"hidden", "gdn.recurrent", "gdn.conv", "ring.key", "ring.value"} < parts.keys()
    for name, array in parts.items():
        others = {key: value for key, value in parts.items() if key != name}
        with pytest.raises(RestoreError, match=f"^{name}: missing"):
            engine.restore(changed(saved, others))
        with pytest.raises(RestoreError, match=f"^{name}: is float16"):
            engine.restore(changed(saved, others | {name: array.astype(np.float16)}))
        with pytest.raises(RestoreError, match=f"^{name}: is float32"):
            engine.restore(changed(saved, others | {name: array[..., :-1]}))
        positions = dict(saved.record.positions)
        low, high = positions[name]
        for ends in ((low, high - 1), (low + 1, high), None):
            altered = positions | {name: ends} if ends else {**positions}
            if ends is None:
                del altered[name]
            with pytest.raises(RestoreError, match=f"^{name}: covers positions"):
                engine.restore(changed(saved, positions=altered))
    with pytest.raises(RestoreError, match="^extra: unexpected"):
        engine.restore(changed(saved, parts | {"extra": np.zeros(3)}))


def test_every_field_of_the_record_is_needed(saved):
    values = json.loads(json.dumps(saved.record.to_json()))
    assert Record.from_json(values) == saved.record
    for name in values:
        rest = {key: value for key, value in values.items() if key != name}
        with pytest.raises(RestoreError, match=f"field {name} is missing"):
            Record.from_json(rest)
    with pytest.raises(RestoreError, match="field more is unknown"):
        Record.from_json(values | {"more": 1})
    frontier = saved.frontier
    for wrong in (frontier - 1, frontier + 1, 0):
        with pytest.raises(RestoreError, match=f"frontier: got {wrong}, but 3 prompt"):
            dataclasses.replace(saved.record, frontier=wrong)


def test_nothing_is_left_behind():
    """Dropped checkpoints give their pages back, restored requests take none along."""
    engine = small.new_engine("dflash")
    wanted = dict(prompt=[1, 2, 3], max_new_tokens=30, eos_ids=(), stop=())
    taken = checkpoints(engine, **wanted)
    requests = [engine.restore(one, seed=i) for i, one in enumerate(taken[:6])]
    engine.run()
    for request in requests:
        assert request.finish_reason == "length" and request.origin is None
    del taken, request
    gc.collect()
    leases = [lease for lease in engine.batch._leases if lease is not None]
    held = {page for lease in leases for page in lease.pages}
    assert engine.batch.allocator.used == len(held)


SCRIPT = """
import json, sys
import numpy as np
from dflash_jax import Checkpoint
from tests.sessions import small
engine = small.new_engine("dflash2")
request = small.finish(engine, engine.restore(Checkpoint.load(sys.argv[1])))
parts = small.final_parts(engine, request)
np.savez(sys.argv[2], **parts)
rounds = [vars(r) for r in request.rounds]
print(json.dumps([request.tokens, request.text, rounds, request.prefilled, request.restored]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [small.HOT], ids=["sampled"])
def test_going_on_in_another_process(sampling, tmp_path):
    engine = shared("dflash2")
    wanted = dict(prompt=[9, 8, 7], seed=6, sampling=sampling, max_new_tokens=30, ignore_eos=True)
    whole, arrays = uninterrupted(engine, **wanted)
    request = engine.submit(**wanted)
    while len(request.tokens) < 13:
        engine.step()
    checkpoint = engine.checkpoint(request)
    checkpoint.save(tmp_path / "saved")
    finish(engine, request)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "saved", tmp_path / "parts.npz"],
        capture_output=True, text=True, timeout=600, cwd=tiny.__file__.rsplit("/tests/", 1)[0],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tokens, text, rounds, prefilled, restored = json.loads(done.stdout.splitlines()[-1])
    assert (tokens, text, rounds) == (whole[0], whole[1], [vars(r) for r in whole[3]])
    assert (prefilled, restored) == (0, checkpoint.frontier)
    with np.load(tmp_path / "parts.npz") as theirs:
        assert_same_parts(dict(theirs), arrays)


def test_rows_at_rest_do_not_write_to_pages_that_were_taken_from_them():
    """Their pending features must not land in the draft context of whoever has the pages now."""
    wanted = dict(prompt=tiny.prompts(2)[1][:50], max_new_tokens=40, ignore_eos=True)
    whole, arrays = uninterrupted(shared("dflash"), **wanted)
    engine = small.new_engine("dflash", pool_tokens=small.CONTEXT)
    resting = [engine.submit([seed], max_new_tokens=30, ignore_eos=True) for seed in range(3)]
    engine.run()
    state = engine.batch.state
    assert (np.asarray(state.frontier) > np.asarray(state.context_frontier))[:3].all()
    request = finish(engine, engine.submit(**wanted))  # needs the pages of all three
    with pytest.raises(ValueError, match="has no state"):
        engine.checkpoint(resting[1])
    assert said(request) == whole
    assert_same_parts(final_parts(engine, request), arrays)
