"""Checks and times every GPU kernel on the GPU of this machine, and one round at 27B geometry.

    python -m experiments.device_check
    python -m experiments.device_check --parts round
    python -m experiments.device_check --interpret      # its logic, on a machine without a GPU

Every kernel runs at the shapes of the 27B pair (DFlash's full layers at those of the 35B draft),
one row and eight: its outputs are compared with the float32 reference, and its time is a median
over calls with operands in turn, without CUDA graphs. The bandwidth beside it counts the bytes
that must move, against a copy measured on the same device. Then draft and verify of the 27B pair
with random weights, by the kernels and by XLA: 58 GB of weights, so that a GPU of 80 GB needs
XLA_PYTHON_CLIENT_MEM_FRACTION=0.9.

Meant to end in less than 6 minutes, compilation included: what has not begun after --limit_s is
left out, and said so; --parts then runs the rest alone.
The exit code is 1 where a kernel is wrong or something was left out, 2 without a fitting GPU.
"""

import jax
from absl import flags

from experiments import cli, device_plan

_INTERPRET = flags.DEFINE_bool(
    "interpret", False, "interpreted kernels at the embedded pair's size: the check's own test"
)
_PARTS = flags.DEFINE_list("parts", list(device_plan.PARTS), "what to run")
_LIMIT_S = flags.DEFINE_float("limit_s", 270.0, "seconds after which nothing new is begun")


def main() -> None:
    make = device_plan.interpreted_plan if _INTERPRET.value else device_plan.device_plan
    plan = make(_PARTS.value)
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}", flush=True)
    failures = device_plan.run(plan, lambda line: print(line, flush=True), _LIMIT_S.value)
    cli.exit_on(failures)
    print("everything was checked")


if __name__ == "__main__":
    cli.run(main)
