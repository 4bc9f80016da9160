"""Engines that tests share, random requests for them, and what each gives alone."""

import dataclasses
import functools

import numpy as np

from dflash_jax import Engine, Sampling
from tests.decoding import tiny
from tests.sessions.letters import Letters

ROWS, K, CONTEXT = 8, 7, 704


@functools.cache
def pair():
    """A small target that writes letters, with an untrained DFlash2 draft."""
    return dataclasses.replace(
        tiny.pair(tiny.DFLASH2, target=tiny.SMALL), tokenizer=Letters(eos_token_ids=(29, 5))
    )


def new_engine(pair=pair, **kwargs) -> Engine:
    options = dict(max_rows=ROWS, draft_tokens=K, max_context=CONTEXT) | kwargs
    return Engine(pair(), **options)


# One engine for most tests: whatever they leave behind in its rows may not matter to the next.
shared = functools.cache(new_engine)


def random_request(rng, longest=600, budget=64) -> dict:
    """Keyword arguments of `submit`, prompt included, and `cancel_at` tokens (None: never)."""
    tokens = int(np.exp(rng.uniform(0, np.log(budget + 1))))  # short ones more often
    length = int(rng.integers(1, longest + 1) if rng.random() < 0.4 else rng.integers(1, 40))
    hot = rng.random() < 0.7
    sampling = Sampling(
        temperature=float(rng.uniform(0.1, 1.3)) if hot else 0.0,
        top_k=int(rng.integers(1, 20)) if rng.random() < 0.3 else 0,
        top_p=float(rng.uniform(0.3, 1)) if rng.random() < 0.3 else 1.0,
        min_p=float(rng.uniform(0, 0.2)) if rng.random() < 0.3 else 0.0,
        presence_penalty=float(rng.uniform(-0.5, 1)) if rng.random() < 0.2 else 0.0,
        frequency_penalty=float(rng.uniform(-0.2, 0.5)) if rng.random() < 0.2 else 0.0,
        repetition_penalty=float(rng.uniform(0.9, 1.5)) if rng.random() < 0.2 else 1.0,
    )
    stops = ("e", "ab", "th", "€", "ca", ". ", "\ufffdb")
    return dict(
        prompt=rng.integers(tiny.VOCAB, size=length).tolist(),
        sampling=sampling,
        seed=int(rng.integers(2**32)),
        max_new_tokens=tokens,
        min_new_tokens=int(rng.integers(0, min(tokens, 9) + 1)) if rng.random() < 0.4 else 0,
        stop=tuple(rng.choice(stops, size=rng.integers(1, 3))) if rng.random() < 0.3 else (),
        ignore_eos=bool(rng.random() < 0.5),
        cancel_at=int(rng.integers(0, tokens + 1)) if rng.random() < 0.2 else None,
    )


def submit(engine: Engine, wanted: dict):
    return engine.submit(**{name: value for name, value in wanted.items() if name != "cancel_at"})


def cancel_when_due(engine: Engine, request, wanted: dict) -> None:
    """A request with enough tokens is cancelled: its own tokens decide, so alone as in a batch."""
    at = wanted["cancel_at"]
    if at is not None and len(request.tokens) >= at and request.tokens:
        engine.cancel(request)


def run_alone(engine: Engine, wanted: dict):
    """The request with every other row empty."""
    assert engine.idle
    request = submit(engine, wanted)
    while not engine.idle:
        engine.step()
        cancel_when_due(engine, request, wanted)
    return request


def outcome(request) -> tuple:
    """Everything that may not depend on the neighbours."""
    return request.tokens, request.text, request.finish_reason, request.rounds


def run_together(engine: Engine, batch: list[dict]) -> list:
    """All at once; returns the requests in order of submission."""
    requests = [submit(engine, wanted) for wanted in batch]
    while not engine.idle:
        engine.step()
        for request, wanted in zip(requests, batch, strict=True):
            cancel_when_due(engine, request, wanted)
    return requests


@functools.cache
def pool():
    """Twelve short requests, seeded, and their outcomes alone in the shared engine."""
    rng = np.random.default_rng(4)
    wanted = [random_request(rng, longest=100, budget=12) for _ in range(12)]
    wanted = [{**one, "cancel_at": None} for one in wanted]
    return wanted, [outcome(run_alone(shared(), one)) for one in wanted]
