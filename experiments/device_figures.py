"""Kernels on the device at hand: right against the reference, and how fast; see `device_check`.

An op is called several times in one program, each call on operands of its own, so that none finds
its inputs in the cache because the call before it left them there, and so that the time of a
launch from Python is shared. The calls wait for each other. Programs are enqueued several at a
time; the median over such samples counts.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import registry
from pallas_kernels.shapes import Case

# Operands of all calls together: several times the second-level cache of an H200 (50 MB). Very
# small ops stay below it, with `MOST_CALLS`; in a model too they find their inputs in the cache.
_ROTATED_BYTES = 200e6
MOST_CALLS = 16
_SAMPLES = 11
_SAMPLE_SECONDS = 0.02
_MOST_PROGRAMS = 50  # of a sample

# Largest error of an output, relative to its entry and the root mean square of all together: a few
# roundings of the dtype for the short ones; float32 sums in another order, and TF32 in three
# passes, for float32.
_TOLERANCE = {"bfloat16": 2**-6, "float16": 2**-6, "float32": 2e-3}

# CUDA graphs would hide what a launch costs; XLA does not build any with this.
COMPILER_OPTIONS = {"xla_gpu_enable_command_buffer": ""}


def real_cases() -> Iterator[Case]:
    """Every op at the first geometry that has it: the 27B pair for all but DFlash's full layers."""
    for cases in registry.CASES.values():
        geometry: dict[str, str] = {}
        for case in cases():
            name = case.shape.split()[0]
            if geometry.setdefault(case.op, name) == name:
                yield case


def small_cases() -> Iterator[Case]:
    """Every op at the embedded pair's geometry, one row: small enough for an interpreted kernel."""
    for cases in registry.CASES.values():
        yield from (case for case in cases() if case.shape == "embedded-dflash2 B=1")


@dataclasses.dataclass(frozen=True)
class Measured:
    """One op at one shape on this device.

    Attributes:
      case: what ran.
      implementation: which kernel of the op.
      seconds: median of one call.
      errors: largest error of each output, see `worst_errors`; 0 or infinity for integers.
      failures: what is wrong, in words.
    """

    case: Case
    implementation: str
    seconds: float
    errors: tuple[float, ...]
    failures: tuple[str, ...]

    @property
    def bandwidth(self) -> float:
        """Bytes that must move, per second."""
        return self.case.minimum_bytes / self.seconds


def measure(case: Case, implementation: str, most_calls: int = MOST_CALLS) -> Measured:
    """Runs a kernel against the reference and times it, at most `most_calls` calls in turn."""
    calls = int(min(max(_ROTATED_BYTES // case.minimum_bytes, 2), most_calls))
    make = jax.jit(case.operands)
    operands = [make(jax.random.key(index)) for index in range(calls)]
    # In float32 throughout: by default a GPU rounds the operands of its products to TF32.
    with jax.default_matmul_precision("highest"):
        reference = jax.jit(functools.partial(case.run, implementation="reference"))
        expected = jax.device_get(reference(*operands[0]))

    moving = [tuple(ops[i] for i in case.in_place) for ops in operands]
    fixed = [
        tuple(x for i, x in enumerate(ops) if i not in case.in_place) for ops in operands
    ]
    del operands  # the moving ones are donated
    program = jax.jit(calls_in_turn(case, implementation), donate_argnums=0)
    program = program.lower(moving, fixed).compile(compiler_options=COMPILER_OPTIONS)
    moving, outputs = program(moving, fixed)
    got = jax.device_get((*moving[0], *outputs[0]))
    errors, failures = compare(got, jax.tree.leaves(expected))
    seconds = median_seconds(program, moving, fixed) / calls
    name = f"{case.op} {case.shape} ({implementation})"
    return Measured(
        case, implementation, seconds, errors, tuple(f"{name}: {text}" for text in failures)
    )


def calls_in_turn(case: Case, implementation: str) -> Callable:
    """`(moving, fixed) -> (moving, outputs)`: one call per element of the lists.

    Element i of `moving` holds the operands of call i that are updated in place and of the result
    what they became; `fixed` holds the others.
    """

    def run(moving, fixed):
        after, outputs, token = [], [], ()
        for own, shared in zip(moving, fixed, strict=True):
            # A call may not start, nor be merged with another, before the last one has ended.
            own, shared, _ = jax.lax.optimization_barrier((own, shared, token))
            operands = list(shared)
            for index, x in zip(case.in_place, own, strict=True):
                operands.insert(index, x)
            token = tuple(jax.tree.leaves(case.run(*operands, implementation=implementation)))
            after.append(token[: len(case.in_place)])
            outputs.append(token[len(case.in_place) :])
        return after, outputs

    return run


def median_seconds(program: Callable, moving, fixed) -> float:
    """Of one call of `program(moving, fixed) -> (moving, rest)`, which may consume `moving`."""

    def sample(programs):
        nonlocal moving
        begin = time.perf_counter()
        for _ in range(programs):
            moving, rest = program(moving, fixed)
        jax.block_until_ready((moving, rest))
        return (time.perf_counter() - begin) / programs

    sample(1)
    programs = int(min(max(_SAMPLE_SECONDS / sample(1), 1), _MOST_PROGRAMS))
    return statistics.median(sample(programs) for _ in range(_SAMPLES))


def compare(got, expected) -> tuple[tuple[float, ...], list[str]]:
    """(error of each output, what is wrong): integers must be equal, the rest within tolerance."""
    errors, failures = [], []
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        one, other = np.asarray(one), np.asarray(other)
        if one.shape != other.shape or one.dtype != other.dtype:
            raise ValueError(
                f"output {index}: got {one.dtype}{one.shape}, the reference has "
                f"{other.dtype}{other.shape}"
            )
        if one.dtype.kind in "iub":
            different = int(np.sum(one != other))
            errors.append(float("inf") if different else 0.0)
            if different:
                failures.append(f"output {index}: {different} of {one.size} integers differ")
            continue
        limit = _TOLERANCE[one.dtype.name]
        one, other = one.astype(np.float32), other.astype(np.float32)
        scale = np.abs(other) + np.sqrt(np.mean(np.square(other)))
        # Not a number, on either side, compares as too large.
        error = float(np.max(np.abs(one - other) / np.maximum(scale, 1e-30)))
        errors.append(error)
        if not error <= limit:
            failures.append(f"output {index}: error {error:.2g}, at most {limit:.2g} is expected")
    return tuple(errors), failures


def copy_bandwidth(megabytes: int) -> float:
    """Bytes per second, read and written, of XLA's own loop over two large arrays in turn."""
    arrays = [jnp.full(megabytes * 10**6 // 4, i, jnp.uint32) for i in range(2)]
    program = jax.jit(lambda arrays, _: ([x + 1 for x in arrays], ()), donate_argnums=0)
    program = program.lower(arrays, ()).compile(compiler_options=COMPILER_OPTIONS)
    size = 2 * sum(x.nbytes for x in arrays)
    return size / median_seconds(program, arrays, ())
