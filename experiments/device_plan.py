"""What `device_check` runs, in which order, and the lines it prints."""

import dataclasses
import importlib.util
import time
from collections.abc import Callable, Sequence

import jax

from dflash_jax.decoding.spec import Spec
from experiments import device_figures, device_round, round_programs
from experiments.configs import qwen27b, tiny
from pallas_kernels import dispatch
from pallas_kernels.shapes import Case

Say = Callable[[str], None]
PARTS = ("kernels", "round")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run of the check.

    Attributes:
      parts: which of `PARTS` to run.
      kernels: implementation that is checked, "pallas" or "pallas_interpret".
      cases: ops at shapes.
      spec: pair whose round is timed.
      rows: of that round.
      capacity: of a row, in tokens.
      copy_megabytes: of each of the two arrays whose copy is the measure of bandwidth.
      most_calls: of an op in one program.
    """

    parts: tuple[str, ...]
    kernels: str
    cases: tuple[Case, ...]
    spec: Spec
    rows: int
    capacity: int
    copy_megabytes: int
    most_calls: int


def device_plan(parts: Sequence[str] = PARTS) -> Plan:
    """Every kernel and the round at 27B geometry, for a GPU.

    Raises:
      ValueError: the first device is no GPU that the kernels run on, or an unknown part.
    """
    parts = _checked(parts)
    capability, device = dispatch.compute_capability(), jax.devices()[0]
    if capability is None or capability < dispatch.LEAST_CAPABILITY:
        found = device.device_kind if capability is None else f"compute capability {capability}"
        raise ValueError(
            f"the check needs an NVIDIA GPU of compute capability {dispatch.LEAST_CAPABILITY} or "
            f"more; the first device here is {found} ({device.platform}). --interpret runs its "
            "logic on any machine"
        )
    cases = tuple(device_figures.real_cases())
    spec = round_programs.make_spec(qwen27b.TARGET, qwen27b.DFLASH2, "bfloat16")
    return Plan(parts, "pallas", cases, spec, 1, 32768, 1000, device_figures.MOST_CALLS)


def interpreted_plan(parts: Sequence[str] = PARTS) -> Plan:
    """The same at the embedded pair's geometry with interpreted kernels, for any machine."""
    parts = _checked(parts)
    spec = round_programs.make_spec(tiny.TARGET, tiny.DFLASH2, "float32")
    cases = tuple(device_figures.small_cases())
    return Plan(parts, "pallas_interpret", cases, spec, 1, 512, 40, 2)


def _checked(parts: Sequence[str]) -> tuple[str, ...]:
    unknown = [part for part in parts if part not in PARTS]
    if unknown or not parts:
        raise ValueError(f"--parts: got {list(parts)}, expected some of {', '.join(PARTS)}")
    return tuple(parts)


def run(plan: Plan, say: Say, limit_s: float) -> list[str]:
    """Runs everything that begins within `limit_s` seconds and says each result as it comes.

    Returns:
      What failed and what was left out, in words.
    """
    end = time.monotonic() + limit_s
    failures: list[str] = []
    copy = device_figures.copy_bandwidth(plan.copy_megabytes)
    say(f"copy of {2 * plan.copy_megabytes} MB: {copy / 1e9:,.0f} GB/s, read and written")

    def step(name, function, *args):
        if time.monotonic() > end:
            failures.append(f"{name}: left out, the limit of {limit_s:.0f} s is over")
            return
        try:
            failures.extend(function(*args, say))
        # Of a compiler, the device's memory, an optional package: the other steps can still run.
        except (RuntimeError, TypeError, ValueError, ImportError) as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")

    cases = plan.cases if "kernels" in plan.parts else ()
    # One row first: more rows are what a limit of time may cut off.
    one_row = [case for case in cases if case.shape.endswith("B=1")]
    for case in one_row:
        step(f"{case.op} {case.shape}", _case, case, plan.kernels, plan.most_calls, copy)
    if one_row and plan.kernels == "pallas":
        step("candidate_selector (triton)", _triton_walk, one_row, plan.most_calls, copy)
    if "round" in plan.parts:
        step("round", _round, plan)
    for case in cases:
        if case not in one_row:
            step(f"{case.op} {case.shape}", _case, case, plan.kernels, plan.most_calls, copy)
    return failures


def _case(
    case: Case, implementation: str, most_calls: int, copy: float, say: Say
) -> tuple[str, ...]:
    result = device_figures.measure(case, implementation, most_calls)
    say(
        f"{case.op:<36} {case.shape:<20} {implementation:<8} {result.seconds * 1e6:>10,.1f} us "
        f"{result.bandwidth / 1e9:>8,.1f} GB/s, {result.bandwidth / copy:>4.0%} of the copy, "
        f"{case.moved_bytes / case.minimum_bytes:.2f} x least bytes moved, "
        f"error {max(result.errors):.1e}{' FAILED' if result.failures else ''}"
    )
    return result.failures


def _triton_walk(cases: list[Case], most_calls: int, copy: float, say: Say) -> list[str]:
    if importlib.util.find_spec("jax_triton") is None:
        say("candidate_selector: no jax-triton here, its optional Triton form is not checked")
        return []
    cases = [case for case in cases if case.op == "candidate_selector"]
    return [text for case in cases for text in _case(case, "triton", most_calls, copy, say)]


def _round(plan: Plan, say: Say) -> list[str]:
    needed = device_round.needed_bytes(plan.spec, plan.rows, plan.capacity)
    limit = device_round.memory_limit()
    if limit is not None and limit < needed:
        return [
            f"round: left out, it needs {needed / 1e9:.0f} GB and JAX may take {limit / 1e9:.0f} "
            "(XLA_PYTHON_CLIENT_MEM_FRACTION sets the share of the device)"
        ]
    times, differences, failures = device_round.measure(
        plan.spec, plan.rows, plan.capacity, plan.kernels
    )
    for name, result in times.items():
        say(
            f"round, B={plan.rows}, {plan.capacity} tokens, {name}: draft "
            f"{result.draft * 1e3:,.2f} ms, verify {result.verify * 1e3:,.2f} ms "
            f"(compiled in {result.compiling:.0f} s)"
        )
    say(
        f"round, {plan.kernels} against xla: "
        + ", ".join(f"{name} {value:.3g}" for name, value in differences.items())
    )
    return failures
