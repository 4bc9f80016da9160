"""The plan is what is allocated; what does not fit is refused with numbers."""

import dataclasses

import jax
import numpy as np
import pytest

from dflash_jax import Engine, load_pair
from dflash_jax.config import parse_draft_config, parse_target_config
from dflash_jax.decoding.generate import plan
from dflash_jax.decoding.spec import Spec, Weights
from dflash_jax.io.tensors import abstract_params
from dflash_jax.sessions import programs
from dflash_jax.sessions.memory import OutOfMemoryError, memory_plan
from dflash_jax.state.sequence import init_sequences
from tests.sessions import small


def nbytes(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("kind", list(small.DRAFTS))
def test_the_plan_is_what_an_engine_has(kind):
    engine = small.shared(kind)
    planned, state = engine.memory, engine.batch.state
    assert planned.weights == nbytes(engine.weights)
    kv = state.target.kv
    assert planned.target_kv == kv.key.nbytes + kv.value.nbytes
    assert planned.gdn == nbytes(state.target.gdn)
    pages = state.draft.pages if kind == "dflash" else None
    assert planned.draft_kv == (pages.key.nbytes + pages.value.nbytes if pages else 0)
    assert planned.rings == (nbytes(state.draft.ring) if state.draft else 0)
    assert planned.pending == (nbytes(state.pending) if state.draft else 0)
    held = (
        planned.target_kv
        + planned.draft_kv
        + planned.gdn
        + planned.rings
        + planned.pending
        + planned.tokens
    )
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
    assert request.finished and set(scratch) == {planned.round}


def test_the_workspace_is_estimated_within_a_factor_of_two():
    """Of the embedded pair, whose programs are large enough for the estimate to mean something."""
    engine = Engine(load_pair("tiny", "tiny-dflash2"), max_rows=3, max_context=1024)
    assert 0.5 < engine.memory.workspace / engine.batch.workspace < 2


def test_a_prompts_chunk_copies_no_pool():
    """The only program that reads pages in a loop and writes to them: its scratch memory does not
    grow with the pool."""
    pair = small.pair("dflash")
    spec, weights = plan(pair, small.K)

    def scratch(pages):
        seeds = np.zeros(2, np.uint32)
        shape = jax.eval_shape(
            lambda: init_sequences(
                spec.target, spec.draft, seeds, 1024, spec.width, "float32", 64, pages
            )
        )
        number = jax.ShapeDtypeStruct((), np.int32)
        tokens = jax.ShapeDtypeStruct((1, 16), np.int32)
        lowered = programs.prefill.lower(
            spec, weights, shape, number, tokens, jax.ShapeDtypeStruct((1,), np.int32)
        )
        return lowered.compile().memory_analysis().temp_size_in_bytes

    small_pool, large_pool = scratch(16), scratch(1024)
    one_page = 2 * 64 * 16 * 4
    assert large_pool - small_pool < 16 * one_page


def test_published_geometries(geometries):
    """The 27B pair in bfloat16: 40 MiB of rings a row, and its weights."""
    target = parse_target_config(geometries / "qwen3.5-27b.json")
    draft = parse_draft_config(geometries / "qwen3.8-27b-dflash2.json")
    weights = Weights(abstract_params(target, "bfloat16"), abstract_params(draft, "bfloat16"))
    spec = Spec(target, draft, 7, target.vocab_size, "bfloat16")
    options = dict(max_context=4096, prefill_chunk=256, page_size=64, pages=64)
    three = memory_plan(spec, weights, rows=3, **options)
    assert three.rings == 3 * 40 * 2**20
    # 16 of 64 layers attend; keys and values of 4 heads of 256, two bytes each.
    assert three.target_kv == 16 * 4096 * 2 * 4 * 256 * 2
    assert three.draft_kv == 0
    assert three.weights == nbytes_of(weights) > 2 * (1_924_404_480 + 26e9)


def nbytes_of(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_what_does_not_fit_is_refused():
    pair = small.pair("dflash2")
    with pytest.raises(OutOfMemoryError, match=r"needs .* MiB, the device has 0\.0 \(weights .*kv"):
        Engine(pair, max_context=64, memory_bytes=1000)
    planned = small.shared("dflash2").memory
    planned.check(planned.total)
    planned.check(None)
    with pytest.raises(OutOfMemoryError):
        planned.check(planned.total - 1)
    assert planned.total == sum(dataclasses.asdict(planned).values())


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
