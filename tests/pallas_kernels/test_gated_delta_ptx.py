"""Verify and Fold do the same arithmetic on the state, read off their PTX; no GPU is needed.

Interpreted on a CPU the two kernels agree to the bit, but there XLA compiles them. For a GPU the
tests below follow every register of the carried state back through the loop's body: the same
operations in the same order, fused multiply-adds and shuffles of the sums included, give the same
bits for the same records.
"""

import collections
import re

import pytest

from pallas_kernels import cuda_compile, registry
from tests.pallas_kernels.tools import needs_triton


class Ptx:
    """Definitions of registers, and what is stored to shared memory."""

    def __init__(self, text):
        self.definitions, self.shared, self._known = collections.defaultdict(list), [], {}
        for line in text.splitlines():
            line = re.sub(r"//.*", "", line).strip()
            line = re.sub(r"^@!?%\w+\s+", "", line)  # the predicate
            statement = re.match(r"([a-z][\w.:]*)\s+(.*);$", line)
            if not statement:
                continue
            operation, rest = statement.groups()
            if operation.startswith("st.shared"):
                self.shared += re.findall(r"%\w+", rest.split("]")[1])
            # `{%r1, %r2}` of a vector load, `%r1|%p1` of a shuffle, or a single register.
            operands = re.match(r"(\{[^}]*\}|[^,]+),\s*(.*)", rest)
            if operands:
                for register in re.findall(r"%\w+", operands[1].split("|")[0]):
                    self.definitions[register].append((operation, operands[2]))

    def expression(self, operand):
        """Hash of the arithmetic behind an operand, down to loads and carried registers."""
        if not operand.startswith("%"):
            return operand
        if operand not in self._known:
            definitions = self.definitions[operand]
            if len(definitions) != 1:
                self._known[operand] = "carried or loaded"
            else:
                self._known[operand] = self._result(*definitions[0])
        return self._known[operand]

    def _result(self, operation, operands):
        if operation.startswith("ld."):
            return operation.split(".")[1]
        if not re.search(r"f32|bf16|shfl|selp|mov", operation):
            return "index"
        return hash((operation, *(self.expression(x.strip()) for x in operands.split(","))))

    def carried(self):
        """Last operations of the loop on registers that a load began: the state's."""
        found = collections.Counter()
        for definitions in self.definitions.values():
            operations = [operation for operation, _ in definitions]
            if any(x.startswith("ld.global") for x in operations):
                for operation, operands in definitions:
                    if operation.startswith(("fma", "add", "mul")) and "f32" in operation:
                        found[self._result(operation, operands)] += 1
        return found


@needs_triton
@pytest.mark.parametrize(
    "gpu", [cuda_compile.A100, cuda_compile.H200], ids=lambda gpu: gpu.device_kind
)
def test_verify_and_fold_do_the_same_arithmetic(gpu):
    cases = {
        case.op: case
        for case in registry.CASES["gated_delta_rule"]()
        if case.shape == "27b-dflash2 B=1"
    }
    verify, fold = (
        Ptx(cuda_compile.to_ptx(kernel, gpu)[0])
        for part in ("verify", "fold")
        for kernel in cuda_compile.kernels(
            cuda_compile.lower(
                cases[f"gated_delta_rule.{part}"].run,
                *cases[f"gated_delta_rule.{part}"].abstract_operands(),
                gpu=gpu,
            )
        )
    )
    # A strip of 128 x 8 on 32 threads.
    assert fold.carried().total() == 32
    assert fold.carried() == verify.carried()
    # Normalised keys go to the threads of the state through shared memory; verify has queries too.
    keys = collections.Counter(map(fold.expression, fold.shared))
    everything = collections.Counter(map(verify.expression, verify.shared))
    assert keys.total() > 0 and keys <= everything
