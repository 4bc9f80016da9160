"""What the GPU kernels cost, found without a GPU: machine code and the bytes that must move.

    python -m experiments.kernel_report
    python -m experiments.kernel_report --ops paged_attention.tree --json kernels.json

Every kernel is lowered for CUDA at the shapes of real models, compiled to PTX and SASS for sm_80
(A100) and sm_90 (H200), and checked: no spills, no more shared memory than a program may have.
Beside that stand the bytes and operations of each op and the least time they can take, from
datasheet bandwidth and tensor-core rate. The exit code is 1 where a check fails.

Lowering needs JAX alone; the compilers come with `pip install 'dflash-jax[kernels]'`
(Linux, x86-64). `--lower_only` stops before them.
"""

import json
import pathlib

from absl import flags

from experiments import cli, kernel_figures
from pallas_kernels import cuda_compile

_OPS = flags.DEFINE_list("ops", [], "ops to report, by the start of their names (default: all)")
_SHAPES = flags.DEFINE_list("shapes", [], "shapes to report, by the start of their names")
_LOWER_ONLY = flags.DEFINE_bool("lower_only", False, "lower for CUDA, do not compile")
_JSON = flags.DEFINE_string("json", None, "file for the same figures as JSON")


def main() -> None:
    compiling = not _LOWER_ONLY.value
    if compiling and (missing := cuda_compile.missing_tools()):
        raise ValueError(f"{missing} (--lower_only reports what needs no compiler)")
    cases = kernel_figures.selected_cases(_OPS.value, _SHAPES.value)
    rows = [kernel_figures.figures(case, compiling=compiling) for case in cases]
    console = cli.table_console()
    kernel_figures.print_report(console, rows)
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps(rows, indent=2) + "\n", "utf-8")
    cli.exit_on([text for row in rows for text in row["failures"]])


if __name__ == "__main__":
    cli.run(main)
