"""Measurements that scripts share: whole generations, and what each phase of a round costs."""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import Generation, Pair, Sampling, load_pair
from dflash_jax.decoding import round as phases
from dflash_jax.decoding.acceptance import point_mass
from dflash_jax.decoding.generate import prepare, read_results
from dflash_jax.decoding.result import accepted_per_position
from dflash_jax.decoding.spec import Spec, Weights


def run_all(
    pair: Pair,
    prompts: list[list[int]],
    *,
    rows: int,
    draft_tokens: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> tuple[list[Generation], float]:
    """Generates from every prompt, `rows` at a time; returns results and decode seconds.

    The seconds leave out compilation and prefill. Prompt i has seed `seed + i` in any batching.
    """
    results, seconds = [], 0.0
    warm = False
    for start in range(0, len(prompts), rows):
        batch = prompts[start : start + rows]
        options = dict(
            draft_tokens=draft_tokens,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature),
            seed=[seed + start + index for index in range(len(batch))],
        )
        if not warm or len(batch) != rows:
            job = prepare(pair, batch, **options)
            jax.block_until_ready(job.decode(job.prefill()))
            warm = True
        job = prepare(pair, batch, **options)
        state = jax.block_until_ready(job.prefill())
        begin = time.perf_counter()
        _, progress = jax.block_until_ready(job.decode(state))
        seconds += time.perf_counter() - begin
        results += read_results(pair, job, progress)
    return results, seconds


def summarise(name: str, draft_tokens: int, results: list[Generation], seconds: float) -> dict:
    """Figures of one setting; tau is a mean over rounds, its interval a bootstrap over prompts."""
    rounds = [r for result in results for r in result.rounds]
    lengths = [
        np.asarray([r.accepted + 1 for r in result.rounds if r.verified]) for result in results
    ]
    # The prefill chooses the first token of each prompt outside the timed part.
    tokens = sum(len(result.tokens) - 1 for result in results)
    return {
        "name": name,
        "draft_tokens": draft_tokens,
        "prompts": len(results),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "rounds": len(rounds),
        "rounds_without_proposals": sum(not r.verified for r in rounds),
        "acceptance_length": pooled_mean(lengths),
        "acceptance_interval": bootstrap_interval(lengths),
        "accepted_per_position": accepted_per_position(rounds, draft_tokens),
    }


def pooled_mean(groups: list[np.ndarray]) -> float:
    """Mean over all elements of all groups; nan without any."""
    count = sum(len(group) for group in groups)
    return float(sum(group.sum() for group in groups) / count) if count else float("nan")


def bootstrap_interval(groups: list[np.ndarray], samples: int = 1000) -> tuple[float, float]:
    """95 % percentile interval of the pooled mean, resampling whole groups (seed fixed)."""
    groups = [group for group in groups if len(group)]  # an empty one has no mean to resample
    if not groups:
        return float("nan"), float("nan")
    sums = np.asarray([group.sum() for group in groups], np.float64)
    counts = np.asarray([len(group) for group in groups])
    picks = np.random.default_rng(0).integers(0, len(groups), (samples, len(groups)))
    means = sums[picks].sum(1) / counts[picks].sum(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def phase_seconds(
    pair: Pair, prompts: list[list[int]], draft_tokens: int, repeats: int = 100, trials: int = 5
) -> dict[str, float]:
    """Seconds per call of draft (catch-up + propose) and verify (+ accept + commit), all rows.

    Each phase runs `repeats` times inside one compiled loop, as it does when decoding, at a fixed
    frontier; the figure is the fastest of `trials`. Without a draft there is only verify: a
    plain step.
    """
    job = prepare(pair, prompts, draft_tokens=draft_tokens, max_new_tokens=64)
    spec, weights = job.spec, job.weights
    state = job.prefill()
    seconds = {"verify": _time(_verify_loop, spec, repeats, trials, weights, state, job.controls)}
    if spec.draft is not None:
        seconds["draft"] = _time(_draft_loop, spec, repeats, trials, weights, state, job.controls)
    return seconds


def _time(loop, spec: Spec, repeats: int, trials: int, *args) -> float:
    compiled = jax.jit(partial(loop, spec, repeats))
    jax.block_until_ready(compiled(*args))
    best = float("inf")
    for _ in range(trials):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        best = min(best, time.perf_counter() - begin)
    return best / repeats


def _verify_loop(spec: Spec, repeats: int, weights: Weights, state, controls):
    full = jnp.full_like(state.frontier, spec.draft_tokens)
    tokens = jnp.zeros((len(full), spec.draft_tokens), jnp.int32)
    frontier = state.frontier

    def body(index, state):
        # The proposals depend on the loop, so that nothing can be hoisted out of it.
        proposal = point_mass(tokens + index % 2, full)
        verified = phases.verify(spec, weights, state, proposal)
        accepted = phases.accept(spec, state, verified, proposal, controls)
        state = phases.commit(state, verified, accepted, accepted.licensed)
        return state._replace(frontier=frontier)

    return jax.lax.fori_loop(0, repeats, body, state)


def _draft_loop(spec: Spec, repeats: int, weights: Weights, state, controls):
    full = jnp.full_like(state.frontier, spec.draft_tokens)
    behind = jnp.maximum(state.frontier - spec.width // 2, 0)

    def body(_, state):
        # Half a block is pending, about what a round leaves.
        state = phases.catch_up(spec, weights, state._replace(context_frontier=behind))
        proposal = phases.propose(spec, weights, state, controls, full)
        return state._replace(anchor=proposal.tokens[:, 0])

    return jax.lax.fori_loop(0, repeats, body, state)


def compare(
    *,
    target: str,
    drafts: list[str],
    prompts: list[list[int]],
    rows: int,
    draft_tokens: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    dtype: str,
    context_dtype: str | None = None,
    proposal_head: str | None = None,
) -> dict:
    """Measures plain decoding and each draft in one run; see `experiments.compare`.

    Args:
      proposal_head: each draft is measured with this indexed head too.

    Returns:
      `{"settings": [one dict per setting], ...the arguments}`. Each draft's dict also has c_v, c_d
      (costs in plain steps), model_tokens_per_second (tau / (c_v + c_d) times plain) and
      model_share (measured over modelled).
    """
    options = dict(rows=rows, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    pairs = {"plain": load_pair(target, None, dtype)}
    for name in drafts:
        pairs[name] = load_pair(target, name, dtype, context_dtype=context_dtype)
        if proposal_head is not None:
            indexed = load_pair(
                target, name, dtype, proposal_head=proposal_head, context_dtype=context_dtype
            )
            pairs[f"{name}, {len(indexed.proposal_rows)} rows"] = indexed
    settings, same = [], None
    for name, pair in pairs.items():
        width = draft_tokens if pair.draft else 0
        results, seconds = run_all(pair, prompts, draft_tokens=width, **options)
        row = summarise(name, width, results, seconds)
        row["costs"] = phase_seconds(pair, prompts[:rows], width)
        tokens = [result.tokens for result in results]
        same = tokens if same is None else same
        if temperature == 0:
            row["rows_equal_to_plain"] = sum(a == b for a, b in zip(tokens, same, strict=True))
        settings.append(row)
    plain = settings[0]
    for row in settings[1:]:
        step = plain["costs"]["verify"]
        row["c_v"] = row["costs"]["verify"] / step
        row["c_d"] = row["costs"]["draft"] / step
        model = row["acceptance_length"] / (row["c_v"] + row["c_d"]) * plain["tokens_per_second"]
        row["model_tokens_per_second"] = model
        row["model_share"] = row["tokens_per_second"] / model
    return {
        "target": target,
        "draft_tokens": draft_tokens,
        "prompts": len(prompts),
        "dtype": dtype,
        "context_dtype": context_dtype or dtype,
        **options,
        "settings": settings,
    }
