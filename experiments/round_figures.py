"""What XLA says of the programs of a round on a GPU that is not here; see `compile_round`."""

import dataclasses
import time
from collections.abc import Sequence

import rich.console
import rich.table

from dflash_jax.decoding.spec import Spec
from experiments import round_programs
from experiments.round_programs import Part
from pallas_kernels import cuda_compile, cuda_topology
from pallas_kernels.cuda_compile import Gpu

GPUS = {"A100": cuda_compile.A100, "H200": cuda_compile.H200}


def measure(
    spec: Spec, rows: int, capacity: int, *, gpus: Sequence[str], programs: Sequence[str]
) -> list[dict]:
    """Compiles the named programs for the named GPUs; one dict of plain values each.

    Raises:
      ValueError: a name that does not exist.
    """
    _check("gpus", gpus, GPUS)
    _check("programs", programs, round_programs.NAMES)
    parts = [p for p in round_programs.parts(spec, rows, capacity) if p.name in programs]
    return [figures(part, GPUS[name]) for name in gpus for part in parts]


def _check(flag, names, known):
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"--{flag}: got {', '.join(unknown)}, expected some of {', '.join(known)}")


def figures(part: Part, gpu: Gpu) -> dict:
    """Compiles one program; a refusal of the compiler is one of its failures."""
    begin = time.perf_counter()
    row = {"program": part.name, "gpu": gpu.device_kind, "architecture": f"sm_{gpu.architecture}"}
    try:
        compiled = cuda_topology.compile_program(
            part.function,
            *part.operands,
            gpu=gpu,
            donate=part.donate,
            options=round_programs.XLA_OPTIONS,
        )
    except RuntimeError as error:
        return row | {"failures": [f"{part.name} {row['architecture']}: {error}"]}
    program = cuda_topology.inspect(compiled)
    row |= dataclasses.asdict(program)
    del row["made"]
    row["compile_s"] = time.perf_counter() - begin
    row["state"] = {name: program.makers(array) for name, array in part.kept.items()}
    row["failures"] = [f"{text} ({row['architecture']})" for text in part.failures(program)]
    return row


def print_report(console: rich.console.Console, rows: list[dict]) -> None:
    """One line a program; those that were refused have no figures."""
    table = rich.table.Table(title="Programs of a round, compiled by XLA without a GPU")
    for heading in ("program", "arch"):
        table.add_column(heading)
    for heading in ("arguments MB", "outputs", "in place", "scratch", "compile s"):
        table.add_column(heading, justify="right")
    for heading in ("kernels", "what makes an array of the state's"):
        table.add_column(heading)
    for row in rows:
        sizes = [
            f"{row[name] / 1e6:,.1f}" if name in row else "-"
            for name in ("argument_bytes", "output_bytes", "alias_bytes", "temporary_bytes")
        ]
        makers = [
            f"{name}: {', '.join(f'{count} {made}' for made, count in made_by.items())}"
            for name, made_by in row.get("state", {}).items()
            if made_by
        ]
        kernels = [f"{count} {name}" for name, count in sorted(row.get("kernels", {}).items())]
        table.add_row(
            row["program"],
            row["architecture"],
            *sizes,
            f"{row['compile_s']:.0f}" if "compile_s" in row else "-",
            "\n".join(kernels),
            "\n".join(makers) or "nothing",
        )
    console.print(table)
