"""Compiles the round at 27B geometry for an A100 and an H200 with XLA itself, without a GPU.

    python -m experiments.compile_round
    python -m experiments.compile_round --gpus H200 --programs draft --json round.json

Draft, verify and commit are compiled with abstract weights. Reported are kernels, arguments,
outputs, scratch, and what is updated in place; the exit code is 1 where the compiler spills
registers, copies a ring, a page pool or the recurrent state, or does not update them in place.
Needs JAX's CUDA plugin of the same version beside an ordinary installation (no GPU, no driver):

    pip install --no-deps jax-cuda12-plugin==VERSION jax-cuda12-pjrt==VERSION
    pip install 'dflash-jax[kernels]'    # an assembler, where no CUDA toolkit is installed

On two busy CPU cores the six compilations took seven minutes, most of it verify.
"""

import json
import pathlib

import jax
from absl import flags

from experiments import cli, round_figures, round_programs
from experiments.configs import qwen27b
from pallas_kernels import cuda_topology

_GPUS = flags.DEFINE_list("gpus", list(round_figures.GPUS), "GPUs to compile for")
_PROGRAMS = flags.DEFINE_list("programs", list(round_programs.NAMES), "programs to compile")
_ROWS = flags.DEFINE_integer("rows", 1, "rows that decode together, 1..8")
_CONTEXT = flags.DEFINE_integer("context", 32768, "capacity of a row in tokens")
_JSON = flags.DEFINE_string("json", None, "file for the same figures as JSON")


def main() -> None:
    # Without a device the plugin registers only where it is not to be initialised.
    jax.config.update("jax_platforms", "cpu")
    if missing := cuda_topology.missing_plugin():
        raise ValueError(missing)
    spec = round_programs.make_spec(qwen27b.TARGET, qwen27b.DFLASH2, "bfloat16")
    rows = round_figures.measure(
        spec, _ROWS.value, _CONTEXT.value, gpus=_GPUS.value, programs=_PROGRAMS.value
    )
    console = cli.table_console()
    round_figures.print_report(console, rows)
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps(rows, indent=2) + "\n", "utf-8")
    cli.exit_on([text for row in rows for text in row["failures"]])


if __name__ == "__main__":
    cli.run(main)
