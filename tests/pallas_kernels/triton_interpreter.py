"""Runs the Triton walk of the candidate selector on a CPU: cases in, results out, as .npz files.

    TRITON_INTERPRET=1 python triton_interpreter.py cases.npz results.npz

A process of its own: the interpreter replaces Triton's functions when they are defined.
"""

import sys

import ml_dtypes
import numpy as np

from pallas_kernels.candidate_selector.triton import sizes
from pallas_kernels.candidate_selector.triton_kernel import candidate_walk

ARGUMENTS = (
    "scores", "candidates", "projected", "predecessor", "successor", "anchor", "temperature",
    "uniforms",
)  # fmt: skip


class Tensor:
    """The part of a host tensor that the interpreter asks for, over a NumPy array it shares."""

    def __init__(self, array):
        self.array = np.array(array, order="C")
        # ml_dtypes' arrays offer no pointer of their own.
        self._bytes = self.array.view(np.uint8)

    @property
    def dtype(self):
        return str(self.array.dtype)

    def data_ptr(self):
        return self._bytes.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return Tensor(np.empty(0, self.array.dtype))

    def set_(self, storage, *_):
        self.array, self._bytes = storage.array, storage._bytes

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def copy_(self, other):
        assert other.array is self.array  # the memory was shared all along


def walk(case):
    """The kernel's three outputs."""
    args = [case[name] for name in ARGUMENTS]
    if case["bfloat16"]:
        args[2:5] = (x.astype(ml_dtypes.bfloat16) for x in args[2:5])
    outputs = [np.full(case["uniforms"].shape, -1, np.int32) for _ in range(2)]
    outputs.append(np.full(case["scores"].shape, np.nan, np.float32))
    tensors = [Tensor(x) for x in (*args, *outputs)]
    constants = sizes(case["scores"], case["projected"], case["predecessor"])
    candidate_walk[(len(case["anchor"]),)](*tensors, **constants)
    return [tensor.array for tensor in tensors[-3:]]


def main(source, target):
    """Arrays are named `<case>.<argument>`."""
    arrays = np.load(source)
    results = {}
    for name in sorted({key.split(".")[0] for key in arrays}):
        prefix = f"{name}."
        case = {k.removeprefix(prefix): arrays[k] for k in arrays if k.startswith(prefix)}
        for output, array in zip(("tokens", "choices", "q"), walk(case), strict=True):
            results[prefix + output] = array
    np.savez(target, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
