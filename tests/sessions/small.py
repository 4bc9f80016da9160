"""Small engines for checkpoints: rings of 8 slots, pages of 8 positions, poisoned pools."""

import dataclasses
import functools
import gc

import jax
import numpy as np

from dflash_jax import Engine, Sampling
from dflash_jax.sessions import rows
from tests.decoding import tiny
from tests.sessions.letters import Letters

ROWS, K, CONTEXT, PAGE, CHUNK = 4, 3, 96, 8, 16
DRAFTS = {"plain": None, "dflash": tiny.DFLASH, "dflash2": tiny.DFLASH2}
HOT = Sampling(temperature=0.8, top_p=0.95, frequency_penalty=0.1)


@functools.cache
def pair(kind: str):
    made = tiny.pair(DRAFTS[kind], target=tiny.SMALL)
    return dataclasses.replace(made, tokenizer=Letters(eos_token_ids=(29,)))


def new_engine(kind: str = "dflash", **kwargs) -> Engine:
    """An engine in whose pages nothing but NaN lies."""
    options = dict(
        max_rows=ROWS,
        draft_tokens=K if DRAFTS[kind] else 0,
        max_context=CONTEXT,
        prefill_chunk=CHUNK,
        page_size=PAGE,
    )
    engine = Engine(pair(kind), **(options | kwargs))
    poison(engine)
    return engine


def poison(engine: Engine) -> None:
    """NaN in every page."""
    pools = [
        pool._replace(key=np.full_like(pool.key, np.nan), value=np.full_like(pool.value, np.nan))
        for pool in jax.device_get(rows.pools(engine.batch.state))
    ]
    engine.batch.state = jax.device_put(rows.with_pools(engine.batch.state, tuple(pools)))


@functools.cache
def shared(kind: str) -> Engine:
    """One engine per kind of draft; tests leave it idle."""
    return new_engine(kind)


def finish(engine: Engine, request):
    while not request.finished:
        engine.step()
    return request


def said(request) -> tuple:
    """What a request published, and how."""
    return request.tokens, request.text, request.finish_reason, request.rounds


def final_parts(engine: Engine, request) -> dict[str, np.ndarray]:
    """Every state array of a request that its budget ended."""
    return engine.checkpoint(request).parts()


def assert_same_parts(ours, theirs) -> None:
    """Bit for bit."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype and ours[name].shape == theirs[name].shape
        assert not np.isnan(np.asarray(ours[name], np.float32)).any(), name
        assert ours[name].tobytes() == theirs[name].tobytes(), name


def pages_of(engine: Engine) -> int:
    """Pages in use by whom Python still knows."""
    gc.collect()
    return engine.batch.allocator.used
