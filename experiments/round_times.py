"""Times of one round, phase by phase and as the engine runs it, in microseconds.

Of many repeats the fastest tenth counts: it is what other work on the machine leaves alone.
"""

import time

import jax
import numpy as np

from dflash_jax import Engine, Pair, Sampling
from dflash_jax.decoding import round as phases
from dflash_jax.decoding.generate import plan
from dflash_jax.decoding.loop import PREFILL_CHUNK


def measure(
    pair: Pair,
    prompts: list[list[int]],
    *,
    draft_tokens: int | None,
    sampling: Sampling,
    rounds: int,
) -> dict:
    """Fills an engine with the prompts and measures its rounds.

    Returns:
      engine: its description. "phases alone": each function of the round compiled by itself, on
      the engine's own state. "round": speculate and egress (device and the transfer of licensed
      tokens), commit (device), host (preview, publication, scheduling: the rest), and whole, one
      `Engine.step`. Every row decodes in every measured round.
    """
    warm = 5
    width = plan(pair, draft_tokens)[0].width
    # Rows that are filled first decode while the others' prompts go in, a chunk a step.
    filling = sum(-(-len(prompt) // PREFILL_CHUNK) for prompt in prompts)
    budget = (filling + warm + rounds) * width + 1
    engine = Engine(
        pair,
        max_rows=len(prompts),
        draft_tokens=draft_tokens,
        max_context=max(map(len, prompts)) + budget,
    )
    for index, prompt in enumerate(prompts):
        engine.submit(prompt, sampling=sampling, seed=index, max_new_tokens=budget, ignore_eos=True)
    while engine.waiting:
        engine.step()
    for _ in range(warm - 1):
        engine.step()

    batch = engine.batch
    clock = _Clock(batch)
    wholes = []
    for _ in range(rounds):
        begin = time.perf_counter()
        engine.step()
        wholes.append(time.perf_counter() - begin)
    clock.stop()
    parts = {name: np.asarray(times) for name, times in clock.seconds.items()}
    host = np.asarray(wholes) - sum(parts.values())
    micro = {name: _microseconds(times) for name, times in parts.items()}
    return {
        "engine": engine.describe(),
        "rounds": rounds,
        "phases alone": phases_alone(engine, rounds),
        "round": {
            **micro,
            "host": _microseconds(host),
            "whole": _microseconds(wholes),
        },
    }


def _microseconds(times) -> float:
    return 1e6 * float(np.quantile(times, 0.1))


class _Clock:
    """Times `speculate` (whose result is on the host) and `commit` (waiting for its end)."""

    def __init__(self, batch):
        self._batch = batch
        self.seconds: dict[str, list[float]] = {"speculate and egress": [], "commit": []}
        speculate, commit = batch.speculate, batch.commit

        def timed_speculate(planned):
            begin = time.perf_counter()
            egress = speculate(planned)
            self.seconds["speculate and egress"].append(time.perf_counter() - begin)
            return egress

        def timed_commit(counts):
            begin = time.perf_counter()
            commit(counts)
            jax.block_until_ready(batch.state)
            self.seconds["commit"].append(time.perf_counter() - begin)

        batch.speculate, batch.commit = timed_speculate, timed_commit

    def stop(self) -> None:
        del self._batch.speculate, self._batch.commit


def phases_alone(engine: Engine, repeats: int) -> dict[str, float]:
    """Microseconds of each phase on the engine's state, none of which it changes."""
    spec, weights, batch = engine.spec, engine.weights, engine.batch
    state, controls = batch.state, batch.controls
    full = jax.device_put(np.full(batch.rows, spec.draft_tokens, np.int32))
    times = {}

    def run(name, function, *args, statics=0):
        compiled = jax.jit(function, static_argnums=range(statics))
        out = jax.block_until_ready(compiled(*args))
        taken = []
        for _ in range(repeats):
            begin = time.perf_counter()
            jax.block_until_ready(compiled(*args))
            taken.append(time.perf_counter() - begin)
        times[name] = _microseconds(taken)
        return out

    caught_up = run("catch_up", phases.catch_up, spec, weights, state, statics=1)
    proposal = run("propose", phases.propose, spec, weights, caught_up, controls, full, statics=1)
    verified = run("verify", phases.verify, spec, weights, caught_up, proposal, statics=1)
    accepted = run(
        "accept", phases.accept, spec, caught_up, verified, proposal, controls, statics=1
    )
    licensed = accepted.licensed
    run("commit", phases.commit, caught_up, verified, accepted, licensed)
    return times
