"""Kept checkpoints: found by their tokens, moved between tiers, never in a request's way."""

import gc
import json

import numpy as np
import pytest

from dflash_jax import ContextBudget
from dflash_jax.sessions.pages import OutOfPagesError
from tests.decoding import tiny
from tests.sessions import small
from tests.sessions.small import finish, said

KIND = "dflash"


def new_engine(**kwargs):
    return small.new_engine(KIND, **kwargs)


def turn(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(tiny.VOCAB, size=length).tolist()


@pytest.fixture(scope="module")
def alone():
    """What an engine that keeps nothing says to a prompt."""
    engine = small.shared(KIND)

    def say(prompt, **wanted):
        return said(finish(engine, engine.submit(prompt, **wanted)))

    return say


WANTED = dict(max_new_tokens=10, ignore_eos=True)


def test_a_conversation_goes_on_from_its_turns(alone):
    """Each prompt is all that was said and one turn more; only what is new is processed."""
    engine = new_engine(checkpoint_turns=True)
    history, known = [], 0
    for number in range(4):
        history += turn(7, number)
        request = finish(engine, engine.submit(history, **WANTED))
        assert said(request) == alone(history, **WANTED)
        assert (request.restored, request.prefilled) == (known, len(history) - known)
        history += request.tokens
        known = len(history) - 1  # its last token was chosen, not processed
    statistics = engine.contexts.statistics
    assert (statistics.lookups, statistics.hits) == (4, 3)
    assert statistics.tokens_saved == 16 + 33 + 50
    # Two per request: before its first token, and at its end.
    assert statistics.entries == {"device": 8, "host": 0, "disk": 0}


def test_a_replaced_suffix(alone):
    """The same beginning, another end: the turn checkpoint stands before what is replaced."""
    engine = new_engine(checkpoint_turns=True)
    start = turn(20, 1)
    first = finish(engine, engine.submit([*start, 1, 2], suffix_tokens=2, **WANTED))
    assert first.restored == 0
    other = finish(engine, engine.submit([*start, 5, 6, 7], suffix_tokens=3, **WANTED))
    assert (other.restored, other.prefilled) == (20, 3)
    assert said(other) == alone([*start, 5, 6, 7], **WANTED)
    same = engine.submit([*start, 9], suffix_tokens=1, **WANTED)
    engine.step()
    kept = engine.checkpoint(same, turn=True)
    assert kept.frontier == 20
    finish(engine, same)
    assert engine.checkpoint(same, turn=True).frontier == 20 + 1 + 10 - 1


def test_the_whole_prompt_is_kept(alone):
    """A prompt seen before needs no processing at all, and is answered by another seed anew."""
    engine = new_engine(checkpoint_turns=True)
    prompt = turn(17, 2)
    for seed in range(3):
        wanted = dict(max_new_tokens=12, seed=seed, sampling=small.HOT)
        request = finish(engine, engine.submit(prompt, **wanted))
        assert said(request) == alone(prompt, **wanted)
        assert request.prefilled == (0 if seed else 17)


@pytest.mark.parametrize("length", [1, 8, 9, 16, 17, 24, 25])
def test_other_prompts_find_nothing(alone, length):
    """One token differs, at the first or last place: no hit, however alike the rest is."""
    engine = ENGINES.setdefault("turns", new_engine(checkpoint_turns=True))
    prompt = turn(length, 30 + length)
    finish(engine, engine.submit(prompt, **WANTED))
    for place in {0, length - 1}:
        other = list(prompt)
        other[place] = (other[place] + 1) % tiny.VOCAB
        request = finish(engine, engine.submit([*other, 5], **WANTED))
        if place == 0:
            assert request.restored == 0
        assert request.restored < length
        assert said(request) == alone([*other, 5], **WANTED)


ENGINES: dict = {}


def test_budgets_move_the_oldest_down(tmp_path, alone):
    """Device, host, disk, gone: in order of use, never a pinned one; and still found there."""
    engine = new_engine(checkpoint_turns=True, contexts=ContextBudget(directory=tmp_path))
    prompts = [turn(12, seed) for seed in range(10, 16)]
    for prompt in prompts:
        finish(engine, engine.submit(prompt, **WANTED))
    contexts = engine.contexts
    kept = contexts.kept
    assert [one.tier for one in kept] == ["device"] * 12
    one = contexts.statistics.nbytes["device"] // 12

    def shrink(**budget):
        contexts.budget = ContextBudget(directory=tmp_path, **budget)
        contexts.balance()
        assert all(
            contexts.statistics.nbytes[name.split("_")[0]] <= limit
            for name, limit in budget.items()
        )

    kept[0].pinned = True
    shrink(device_bytes=7 * one)
    tiers = [checkpoint.tier for checkpoint in kept]
    assert tiers[0] == "device" and tiers[1:6] == ["host"] * 5 and tiers[-1] == "device"
    shrink(device_bytes=7 * one, host_bytes=2 * kept[1].nbytes)
    assert [checkpoint.tier for checkpoint in kept][1:4] == ["disk"] * 3
    assert kept[5].tier == "host"
    for prompt in prompts:  # found wherever it is
        request = finish(engine, engine.submit([*prompt, 3, 4], **WANTED))
        assert request.restored == 12
        assert said(request) == alone([*prompt, 3, 4], **WANTED)
    shrink(device_bytes=10**9, host_bytes=0)
    on_disk = [checkpoint for checkpoint in contexts.kept if checkpoint.tier == "disk"]
    size = on_disk[0].disk_bytes
    shrink(device_bytes=10**9, host_bytes=0, disk_bytes=2 * size + size // 2)
    assert contexts.statistics.evictions > 0
    assert kept[0] in contexts.kept and kept[0].tier == "device"
    assert len(list(tmp_path.iterdir())) == sum(c.path is not None for c in contexts.kept)


def test_the_catalogue_survives_a_restart(tmp_path, alone, caplog):
    """A later engine finds what is on disk; other pairs' files and damaged ones are left alone."""
    budget = ContextBudget(host_bytes=0, device_bytes=0, directory=tmp_path)
    first = new_engine(checkpoint_turns=True, contexts=budget)
    prompt = turn(30, 4)
    answer = finish(first, first.submit(prompt, **WANTED))
    assert first.contexts.statistics.entries == {"device": 0, "host": 0, "disk": 2}
    del first
    gc.collect()
    other = small.new_engine("plain", contexts=budget)
    assert other.contexts.kept == [] and len(list(tmp_path.iterdir())) == 2
    second = new_engine(checkpoint_turns=True, contexts=budget)
    assert len(second.contexts.kept) == 2
    longer = [*prompt, *answer.tokens, 8]
    request = finish(second, second.submit(longer, **WANTED))
    assert (request.restored, request.prefilled) == (39, 2)
    assert said(request) == alone(longer, **WANTED)
    # A damaged file costs its own checkpoint, and nothing else.
    (newest,) = [one for one in second.contexts.kept if one.frontier == 39]
    for file in newest.path.rglob("*"):
        if file.is_file() and file.stat().st_size > 200 and "METADATA" not in file.name:
            file.write_bytes(file.read_bytes()[:-50] + bytes(50))
    caplog.clear()
    longer[-1] += 1
    request = finish(second, second.submit(longer, **WANTED))
    assert request.restored == 30 and newest not in second.contexts.kept
    assert said(request) == alone(longer, **WANTED)
    assert "a kept checkpoint is left out" in caplog.text and str(newest.path) in caplog.text


def test_requests_come_first():
    """Kept checkpoints give way when a request needs their pages; pinned ones are told."""
    engine = new_engine(checkpoint_turns=True, pool_tokens=2 * small.CONTEXT)
    for seed in range(5):
        finish(engine, engine.submit(turn(30, seed), **WANTED))
    big = dict(max_new_tokens=small.CONTEXT - 40, ignore_eos=True)
    requests = [engine.submit(turn(40, 50 + seed), **big) for seed in range(4)]
    engine.run()
    assert all(request.finish_reason == "length" for request in requests)
    assert engine.contexts.statistics.demotions > 0
    for checkpoint in engine.contexts.kept:
        if checkpoint.tier == "host":
            break
    engine.promote(checkpoint)
    assert checkpoint.tier == "device"
    for one in engine.contexts.kept:
        one.pinned = True
        try:
            engine.promote(one)
        except OutOfPagesError:
            break
    request = finish(engine, engine.submit(turn(40, 99), **big))
    assert request.finish_reason == "error" and "pages of 8 positions" in str(request.error)
    for one in engine.contexts.kept:
        one.pinned = False
    again = finish(engine, engine.submit(turn(40, 99), **big))
    assert again.finish_reason == "length"


def test_a_checkpoint_of_ones_own_goes_to_the_host_too(alone):
    """Device checkpoints that the user holds never block a request; they go on from the host."""
    engine = new_engine(pool_tokens=small.CONTEXT)
    request = engine.submit(turn(30, 1), max_new_tokens=40, ignore_eos=True)
    while len(request.tokens) < 20:
        engine.step()
    own = engine.checkpoint(request)
    engine.cancel(request)
    assert own.tier == "device"
    finish(engine, engine.submit(turn(50, 2), max_new_tokens=40))
    assert own.tier == "host"
    again = finish(engine, engine.restore(own))
    assert said(again) == alone(turn(30, 1), max_new_tokens=40, ignore_eos=True)


def test_waiting_requests_keep_their_origin(tmp_path):
    """What a queued request starts from is not dropped under it."""
    budget = ContextBudget(device_bytes=0, host_bytes=0, disk_bytes=0, directory=tmp_path)
    engine = new_engine(contexts=budget)
    request = finish(engine, engine.submit([1, 2, 3], **WANTED))
    checkpoint = engine.checkpoint(request)
    waiting = engine.restore(checkpoint, max_new_tokens=20)
    engine.contexts.keep(checkpoint)
    engine.contexts.balance()
    assert checkpoint in engine.contexts.kept
    assert finish(engine, waiting).finish_reason == "length"
    engine.contexts.balance()
    assert checkpoint not in engine.contexts.kept


def test_budgets_are_checked():
    with pytest.raises(ValueError, match="host_bytes: got -1, expected bytes >= 0, or None"):
        ContextBudget(host_bytes=-1)
    with pytest.raises(ValueError, match="keep: the engine has no ContextBudget"):
        engine = small.shared(KIND)
        request = finish(engine, engine.submit([1], max_new_tokens=1))
        engine.contexts.keep(engine.checkpoint(request))


def test_a_full_disk_keeps_it_in_memory(tmp_path, caplog, monkeypatch):
    """What cannot be written stays where it was, and it is said."""
    from dflash_jax.sessions import checkpoint as module

    def full(path, *rest):
        raise OSError(28, f"{path}: no space left on device")

    monkeypatch.setattr(module, "save_parts", full)
    budget = ContextBudget(device_bytes=0, host_bytes=0, directory=tmp_path)
    engine = new_engine(checkpoint_turns=True, contexts=budget)
    prompt = turn(9, 7)
    finish(engine, engine.submit(prompt, **WANTED))
    assert engine.contexts.statistics.entries["host"] == 2
    assert "stays in memory" in caplog.text and "no space left" in caplog.text
    assert finish(engine, engine.submit([*prompt, 1], **WANTED)).restored == 9


def test_identity_is_plain_json(tmp_path):
    """The name of a folder is that of the pair and the tokens, in any process."""
    engine = new_engine(contexts=ContextBudget(device_bytes=0, host_bytes=0, directory=tmp_path))
    request = finish(engine, engine.submit([1, 2, 3], max_new_tokens=2, ignore_eos=True))
    engine.contexts.keep(engine.checkpoint(request))
    (folder,) = tmp_path.iterdir()
    (kept,) = engine.contexts.kept
    record = json.loads(json.dumps(kept.record.to_json()))
    assert folder == kept.path and record["prompt"] == [1, 2, 3]
