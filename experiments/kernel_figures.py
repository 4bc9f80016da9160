"""Figures of the GPU kernels at real shapes, and their tables; see `kernel_report`."""

import dataclasses
import functools
from collections.abc import Iterable

import rich.console
import rich.table

from pallas_kernels import cuda_compile, registry
from pallas_kernels.cuda_compile import Compiled, Gpu, Kernel
from pallas_kernels.shapes import Case

GPUS = (cuda_compile.A100, cuda_compile.H200)


def selected_cases(ops: Iterable[str], shapes: Iterable[str]) -> list[Case]:
    """Cases whose op and shape start with one of the given names (none given: all).

    Raises:
      ValueError: nothing fits.
    """
    everything = [case for cases in registry.CASES.values() for case in cases()]
    ops, shapes = tuple(ops) or ("",), tuple(shapes) or ("",)
    found = [case for case in everything if case.op.startswith(ops)]
    found = [case for case in found if case.shape.startswith(shapes)]
    if not found:
        names = sorted({case.op for case in everything})
        known = sorted({case.shape for case in everything})
        raise ValueError(
            f"--ops, --shapes: nothing fits {list(ops)}, {list(shapes)}; there are the ops "
            f"{', '.join(names)} and the shapes {', '.join(known)}"
        )
    return found


def lowered_kernels(case: Case, gpu: Gpu) -> list[Kernel]:
    """The kernels that `implementation=None` runs on `gpu`.

    Raises:
      ValueError: it would run none.
    """
    lowered = cuda_compile.lower(case.run, *case.abstract_operands(), gpu=gpu)
    found = cuda_compile.kernels(lowered)
    if not found:
        raise ValueError(f"{case.op} {case.shape}: lowers to no kernel on {gpu.device_kind}")
    return found


def floor_seconds(case: Case, gpu: Gpu) -> tuple[float, float]:
    """Least (memory, arithmetic) time of a case, by datasheet bandwidth and bfloat16 rate."""
    return case.minimum_bytes / gpu.bandwidth, case.flops / gpu.bfloat16_flops


def failures(name: str, compiled: Compiled, gpu: Gpu) -> list[str]:
    """What is wrong with a compiled kernel, in words."""
    found = []
    if compiled.spill_bytes:
        found.append(f"{name} sm_{gpu.architecture}: spills {compiled.spill_bytes} bytes")
    if compiled.shared_bytes > gpu.shared_bytes:
        found.append(
            f"{name} sm_{gpu.architecture}: needs {compiled.shared_bytes} bytes of shared memory, "
            f"{gpu.device_kind} has {gpu.shared_bytes}"
        )
    return found


@functools.cache
def _compiled(kernel: Kernel, gpu: Gpu) -> Compiled:
    # Cases that differ in the batch alone often share their kernels to the byte.
    return cuda_compile.compile_kernel(kernel, gpu)


def figures(case: Case, gpus: Iterable[Gpu] = GPUS, compiling: bool = True) -> dict:
    """Everything the report says of a case, as plain values."""
    row = {
        "op": case.op,
        "shape": case.shape,
        "minimum_bytes": case.minimum_bytes,
        "moved_bytes": case.moved_bytes,
        "flops": case.flops,
        "gpus": {},
        "kernels": [],
        "failures": [],
    }
    for gpu in gpus:
        memory, arithmetic = floor_seconds(case, gpu)
        row["gpus"][gpu.device_kind] = {
            "memory_floor_s": memory,
            "arithmetic_floor_s": arithmetic,
            "moved_s": case.moved_bytes / gpu.bandwidth,
        }
        for kernel in lowered_kernels(case, gpu):
            entry = {
                "name": kernel.name,
                "gpu": gpu.device_kind,
                "architecture": f"sm_{gpu.architecture}",
                "grid": kernel.grid,
                "num_warps": kernel.num_warps,
                "num_stages": kernel.num_stages,
            }
            if compiling:
                compiled = _compiled(dataclasses.replace(kernel, grid=(0, 0, 0)), gpu)
                entry |= dataclasses.asdict(compiled)
                row["failures"] += failures(f"{case.op} {case.shape} {kernel.name}", compiled, gpu)
            row["kernels"].append(entry)
    return row


def print_report(console: rich.console.Console, rows: list[dict]) -> None:
    """Two tables: what moves and what that costs at least; the kernels as compiled."""
    table = rich.table.Table("op", "shape", title="Bytes, operations and time floors")
    for heading in ("least MB", "moved", "GFLOP", *(f"{gpu.device_kind} us" for gpu in GPUS)):
        table.add_column(heading, justify="right")
    for row in rows:
        floors = [
            f"{max(gpu['memory_floor_s'], gpu['arithmetic_floor_s']) * 1e6:.2f}"
            for gpu in row["gpus"].values()
        ]
        table.add_row(
            row["op"],
            row["shape"],
            f"{row['minimum_bytes'] / 1e6:.2f}",
            f"{row['moved_bytes'] / row['minimum_bytes']:.2f}x",
            f"{row['flops'] / 1e9:.3f}",
            *floors,
        )
    console.print(table)
    table = rich.table.Table("kernel", "shape", "arch", "grid", title="Kernels")
    for heading in ("warps", "registers", "spill B", "shared B", "SASS B", "tensor cores"):
        table.add_column(heading, justify="right")
    for row in rows:
        for kernel in row["kernels"]:
            facts = ["-"] * 5
            if "registers" in kernel:
                names = ("registers", "spill_bytes", "shared_bytes", "sass_bytes")
                facts = [str(kernel[name]) for name in names]
                facts.append("yes" if kernel["tensor_core"] else "no")
            table.add_row(
                kernel["name"],
                f"{row['op']} {row['shape']}",
                kernel["architecture"],
                "x".join(map(str, kernel["grid"])),
                str(kernel["num_warps"]),
                *facts,
            )
    console.print(table)
