"""One round on the device at hand, by its kernels and by XLA; see `device_check`.

Weights, pages, rings and states are random: neither kernels nor matrix products run faster or
slower for that, and what the two forms compute can be compared all the same.
"""

import dataclasses
import math
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decoding import round as phases
from dflash_jax.decoding.spec import Spec, Weights
from dflash_jax.state.sequence import SequenceState
from experiments import round_programs
from experiments.device_figures import COMPILER_OPTIONS, median_seconds
from pallas_kernels import dispatch

# Of the logits, relative to their root mean square: bfloat16 roundings of 64 random layers in two
# orders, and float32 ones.
_TOLERANCE = {"bfloat16": 0.1, "float32": 1e-3}
_SCRATCH = 2e9  # bytes of device memory besides weights and state, generously


@dataclasses.dataclass(frozen=True)
class RoundTimes:
    """Medians of one implementation, in seconds; compile time of both programs together."""

    draft: float
    verify: float
    compiling: float


def needed_bytes(spec: Spec, rows: int, capacity: int) -> float:
    """Device memory that `measure` takes: weights, one state and scratch."""
    shapes = (
        round_programs.abstract_weights(spec),
        round_programs.abstract_state(spec, rows, capacity),
    )
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)) + _SCRATCH


def memory_limit() -> int | None:
    """Bytes that JAX may take on the first device; None where it does not say, as on a CPU."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")


def random_like(shapes, key: jax.Array):
    """Random arrays of these shapes, made on the device one by one.

    Matrices keep the size of what they are applied to, vectors (gains, biases) are near one half,
    integers are zero, and the rest is standard normal.
    """

    @partial(jax.jit, static_argnums=(1, 2))
    def make(key, shape, dtype):
        if not jnp.issubdtype(dtype, jnp.floating):
            return jnp.zeros(shape, dtype)
        values = jax.random.normal(key, shape, dtype)
        if len(shape) < 2:
            values = 0.5 + 0.1 * values
        elif len(shape) == 2:
            values = values * shape[-1] ** -0.5
        return values.astype(dtype)

    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(key, len(leaves))
    made = [make(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, made)


def random_state(spec: Spec, rows: int, capacity: int, key: jax.Array) -> SequenceState:
    """Sequences as long as fits, with everything before that in pages, rings and states.

    The last half block is pending: its features are not in the draft's context yet.
    """
    shapes = round_programs.abstract_state(spec, rows, capacity)
    state = random_like(shapes, key)
    frontier = jnp.full(rows, capacity - spec.width, jnp.int32)
    kv = state.target.kv
    table = jnp.arange(kv.block_table.size, dtype=jnp.int32).reshape(kv.block_table.shape)
    state = state._replace(
        frontier=frontier,
        context_frontier=frontier - spec.width // 2,
        anchor=jnp.arange(1, rows + 1, dtype=jnp.int32),
        target=state.target._replace(kv=kv._replace(block_table=table)),
    )
    if state.draft.pages is not None:
        pages = state.draft.pages._replace(block_table=table)
        state = state._replace(draft=state.draft._replace(pages=pages))
    return state


def measure(
    spec: Spec, rows: int, capacity: int, kernels: str
) -> tuple[dict[str, RoundTimes], dict[str, float], list[str]]:
    """Times draft and verify by the kernels and by XLA, on the same weights and state.

    Args:
      kernels: the implementation beside "xla": "pallas", or "pallas_interpret" without a GPU.

    Returns:
      Times by implementation; what differs between the two (share of equal proposals, error of
      the logits relative to their root mean square, share of equal best tokens); failures in
      words.
    """
    keys = jax.random.split(jax.random.key(0), 2)
    weights = random_like(round_programs.abstract_weights(spec), keys[0])
    state = random_state(spec, rows, capacity, keys[1])
    controls = round_programs.greedy_controls(rows)
    times, proposals, logits = {}, {}, {}
    for name in (kernels, "xla"):
        with dispatch.default_implementation(name):
            state, times[name], proposals[name], logits[name] = _measure_one(
                spec, weights, state, controls, proposals.get(kernels)
            )
    tokens = {name: np.asarray(proposal.tokens) for name, proposal in proposals.items()}
    return (times, *compare(tokens, logits, kernels, _TOLERANCE[spec.dtype]))


def compare(
    tokens: dict, logits: dict, kernels: str, limit: float
) -> tuple[dict[str, float], list[str]]:
    """Differences and failures of `measure`.

    Args:
      tokens: `[B, K]` by implementation.
      logits: `[B, W, V]` by implementation, of the same proposals.
      limit: for the error of the logits.
    """
    mine, others = np.asarray(logits[kernels]), np.asarray(logits["xla"])
    error = math.sqrt(np.mean(np.square(mine - others)) / np.mean(np.square(others)))
    differences = {
        "equal proposals": float(np.mean(tokens[kernels] == tokens["xla"])),
        "logit error": error,
        "equal best tokens": float(np.mean(mine.argmax(-1) == others.argmax(-1))),
    }
    failures = []
    if not error <= limit:  # nor is it when it is not a number
        failures.append(
            f"round: logits of {kernels} and xla differ by {error:.2g} of their size, at most "
            f"{limit} is expected"
        )
    return differences, failures


def _measure_one(spec: Spec, weights: Weights, state: SequenceState, controls, proposal):
    """(state, times, own proposal, logits of `proposal`, or of its own if that is None)."""
    begin = time.perf_counter()
    start = state.context_frontier

    def draft(state, fixed):
        weights, controls, start = fixed
        # Every time from the pending features on: the state never gets ahead.
        state = state._replace(context_frontier=start)
        return round_programs.draft(spec, weights, state, controls)

    def verify(moving, fixed):
        weights, state, proposal = fixed
        return moving, phases.verify(spec, weights, state, proposal).logits

    fixed = (weights, controls, start)
    compiled = _compile(draft, state, fixed, donate=True)
    state, own = compiled(state, fixed)
    proposal = own if proposal is None else proposal
    checked = (weights, state, proposal)
    verifying = _compile(verify, (), checked, donate=False)
    compiling = time.perf_counter() - begin
    _, logits = verifying((), checked)
    seconds = median_seconds(verifying, (), checked)
    state, drafting = _timed_draft(compiled, state, fixed)
    return state, RoundTimes(drafting, seconds, compiling), own, logits


def _timed_draft(compiled, state, fixed):
    """`median_seconds` of a program that consumes the state; also the state it ends with."""
    kept = [state]

    def program(moving, fixed):
        kept[0], rest = compiled(moving, fixed)
        return kept[0], rest

    seconds = median_seconds(program, state, fixed)
    return kept[0], seconds


def _compile(function, moving, fixed, *, donate: bool):
    lowered = jax.jit(function, donate_argnums=(0,) if donate else ()).lower(moving, fixed)
    return lowered.compile(compiler_options=COMPILER_OPTIONS | round_programs.XLA_OPTIONS)
