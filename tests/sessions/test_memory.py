"""The plan is what is allocated; what does not fit is refused with numbers."""

import dataclasses

import jax
import pytest

from dflash_jax import Engine
from dflash_jax.config import parse_draft_config, parse_target_config
from dflash_jax.decoding.spec import Spec, Weights
from dflash_jax.io.tensors import abstract_params
from dflash_jax.sessions.memory import OutOfMemoryError, memory_plan
from tests.sessions import small


def nbytes(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("kind", list(small.DRAFTS))
def test_the_plan_is_what_an_engine_has(kind):
    engine = small.shared(kind)
    plan, state = engine.memory, engine.batch.state
    assert plan.weights == nbytes(engine.weights)
    kv = state.target.kv
    assert plan.target_kv == kv.key.nbytes + kv.value.nbytes
    assert plan.gdn == nbytes(state.target.gdn)
    pages = state.draft.pages if kind == "dflash" else None
    assert plan.draft_kv == (pages.key.nbytes + pages.value.nbytes if pages else 0)
    assert plan.rings == (nbytes(state.draft.ring) if state.draft else 0)
    assert plan.pending == (nbytes(state.pending) if state.draft else 0)
    held = plan.target_kv + plan.draft_kv + plan.gdn + plan.rings + plan.pending + plan.tokens
    assert held == nbytes(state)
    request = engine.submit([1, 2], max_new_tokens=4, ignore_eos=True)
    scratch = []
    commit = engine.batch.commit
    engine.batch.commit = lambda counts: (
        scratch.append(nbytes(engine.batch._scratch.verified)),
        commit(counts),
    )
    engine.run()
    del engine.batch.commit
    assert request.finished and set(scratch) == {plan.round}


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_the_workspace_is_estimated_within_a_factor_of_two(kind):
    """Of the embedded pair, whose programs are large enough for the estimate to mean something."""
    from dflash_jax import load_pair

    engine = Engine(load_pair("tiny", f"tiny-{kind}"), max_rows=3, max_context=1024)
    assert 0.5 < engine.memory.workspace / engine.batch.workspace < 2
    # And no program copies the pages, which a thousand times as many would make impossible.
    bigger = Engine(engine.pair, max_rows=3, max_context=1024, pool_tokens=2**15)
    assert bigger.memory.target_kv > 5 * engine.memory.target_kv
    assert bigger.batch.workspace < 1.1 * engine.batch.workspace


def test_published_geometries(geometries):
    """The 27B pair in bfloat16: 40 MiB of rings a row, and its weights."""
    target = parse_target_config(geometries / "qwen3.5-27b.json")
    draft = parse_draft_config(geometries / "qwen3.8-27b-dflash2.json")
    weights = Weights(abstract_params(target, "bfloat16"), abstract_params(draft, "bfloat16"))
    spec = Spec(target, draft, 7, target.vocab_size, "bfloat16")
    options = dict(max_context=4096, prefill_chunk=256, page_size=64, pages=64)
    one = memory_plan(spec, weights, rows=1, **options)
    four = memory_plan(spec, weights, rows=4, **options)
    assert one.rings == 40 * 2**20 and four.rings == 4 * one.rings
    # 16 of 64 layers attend; keys and values of 4 heads of 256, two bytes each.
    assert one.target_kv == four.target_kv == 16 * 4096 * 2 * 4 * 256 * 2
    assert one.draft_kv == 0
    assert one.weights == nbytes_of(weights) > 2 * (1_924_404_480 + 26e9)


def nbytes_of(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_what_does_not_fit_is_refused():
    pair = small.pair("dflash2")
    with pytest.raises(OutOfMemoryError, match=r"needs .* MiB, the device has 0\.0 \(weights .*kv"):
        Engine(pair, max_context=64, memory_bytes=1000)
    plan = small.shared("dflash2").memory
    plan.check(plan.total)
    plan.check(None)
    with pytest.raises(OutOfMemoryError):
        plan.check(plan.total - 1)
    assert plan.total == sum(dataclasses.asdict(plan).values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(page_size=0), "page_size: got 0"),
        (dict(pool_tokens=95), "pool_tokens: got 95, expected 96 at least"),
    ],
)
def test_pools_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        Engine(small.pair("dflash2"), **(dict(max_context=96, page_size=8) | options))
