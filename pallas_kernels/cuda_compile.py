"""Compiles the Pallas kernels for a GPU that is not here, as far as machine code.

JAX lowers a function for CUDA on any machine; the kernels inside are Triton modules, which the
`triton` package takes on to PTX and its bundled `ptxas` to SASS. What this says about registers,
spills and shared memory is Triton's compiler of that package, not the copy inside XLA: a close
stand-in, and no proof that the kernel runs.
"""

import dataclasses
import importlib.util
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh


@dataclasses.dataclass(frozen=True)
class Gpu(AbstractDevice):
    """A GPU that is described and not present.

    Attributes:
      compute_capability: such as "9.0".
      shared_bytes: most shared memory one program may ask for.
      bandwidth: device memory, bytes per second, from the datasheet.
      bfloat16_flops: dense tensor-core rate, per second, from the datasheet.
    """

    compute_capability: str = ""
    shared_bytes: int = 0
    bandwidth: float = 0.0
    bfloat16_flops: float = 0.0

    @property
    def architecture(self) -> int:
        """The number in `sm_80`."""
        return int(self.compute_capability.replace(".", ""))


# NVIDIA A100 80GB SXM and H200 SXM datasheets; shared memory from the CUDA programming guide's
# table of compute capabilities (163 and 227 KiB).
A100 = Gpu("NVIDIA A100", 108, "gpu", "8.0", 163 * 1024, 2.039e12, 312e12)
H200 = Gpu("NVIDIA H200", 132, "gpu", "9.0", 227 * 1024, 4.8e12, 989e12)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a lowered function.

    Attributes:
      name: as given to the Pallas call.
      module: Triton's intermediate representation, MLIR bytecode.
      num_warps: warps of a program.
      num_stages: software pipeline depth.
      grid: programs along x, y, z.
    """

    name: str
    module: bytes = dataclasses.field(repr=False)
    num_warps: int
    num_stages: int
    grid: tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compilers say of one kernel; bytes are per thread except `shared_bytes`.

    Attributes:
      registers: per thread.
      spill_bytes: stored to and loaded from local memory, together.
      stack_bytes: local frame.
      shared_bytes: dynamic shared memory of a program.
      sass_bytes: size of the cubin that holds the machine code.
      tensor_core: whether the PTX holds matrix instructions.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    sass_bytes: int
    tensor_core: bool


def lower(function: Callable, *operands, gpu: Gpu):
    """Lowers `function` for CUDA as if `gpu` were the device; operands may be abstract."""
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))


def kernels(lowered) -> list[Kernel]:
    """The Triton kernels of a lowered function, in program order."""
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        return [_kernel(op) for op in _operations(module.operation) if _is_kernel(op)]


def _operations(op) -> Iterator:
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _operations(inner.operation)


def _is_kernel(op) -> bool:
    return (
        op.name == "stablehlo.custom_call"
        and op.attributes["call_target_name"].value == "__gpu$xla.gpu.triton"
    )


def _kernel(op) -> Kernel:
    # Private to JAX, but there is no other way to the bytecode: as text it is escaped twice.
    from jax._src.lib.mlir import ir

    config = {entry.name: entry.attr for entry in ir.DictAttr(op.attributes["mhlo.backend_config"])}

    def number(name):
        return ir.IntegerAttr(config[name]).value

    return Kernel(
        name=ir.StringAttr(config["name"]).value,
        module=ir.StringAttr(config["ir"]).value_bytes,
        num_warps=number("num_warps"),
        num_stages=number("num_stages"),
        grid=tuple(number(f"grid_{axis}") for axis in "xyz"),
    )


def missing_tools() -> str | None:
    """None if `compile_kernel` can run here, else what is missing and how to get it."""
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed: pip install 'dflash-jax[kernels]'"
    try:
        _ptxas()
    except (ImportError, FileNotFoundError, RuntimeError) as error:
        return f"the triton package here has no usable ptxas: {error}"
    return None


def _ptxas() -> str:
    from triton.backends.nvidia.compiler import get_ptxas

    # The one for the newest architectures takes the older ones too, and every PTX version.
    return get_ptxas(90).path


def _module_text(bytecode: bytes) -> str:
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir
    from jaxlib.triton import dialect

    context = mlir.make_ir_context()
    dialect.register_dialect(context)
    with context:
        return ir.Module.parse(bytecode).operation.get_asm()


def to_ptx(kernel: Kernel, gpu: Gpu) -> tuple[str, int]:
    """PTX of a kernel and the dynamic shared memory that a program of it needs, in bytes."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    capability = gpu.architecture
    backend = make_backend(GPUTarget("cuda", capability, 32))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options(
        dict(num_warps=kernel.num_warps, num_stages=kernel.num_stages, enable_fp_fusion=True)
    )
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kernel.ttir")
        path.write_text(_module_text(kernel.module))
        module = ir.parse_mlir_module(str(path), context)
    module.context = context
    facts: dict = {}
    for stage in (backend.make_ttir, backend.make_ttgir, backend.make_llir, backend.make_ptx):
        module = stage(module, facts, options, capability)
    return module, facts["shared"]


def compile_kernel(kernel: Kernel, gpu: Gpu) -> Compiled:
    """Compiles a kernel to machine code.

    Raises:
      RuntimeError: ptxas refuses the PTX; its message is passed on.
    """
    return assemble(kernel.name, *to_ptx(kernel, gpu), gpu)


def assemble(name: str, ptx: str, shared_bytes: int, gpu: Gpu) -> Compiled:
    """The last step: machine code of a kernel's PTX; as `compile_kernel`."""
    from triton.backends.nvidia.compiler import sm_arch_from_capability

    with tempfile.TemporaryDirectory() as folder:
        source, binary = pathlib.Path(folder, "kernel.ptx"), pathlib.Path(folder, "kernel.cubin")
        source.write_text(ptx)
        architecture = sm_arch_from_capability(gpu.architecture)
        done = subprocess.run(
            [_ptxas(), "-v", f"--gpu-name={architecture}", source, "-o", binary],
            capture_output=True,
            text=True,
        )
        log = done.stdout + done.stderr
        if done.returncode:
            raise RuntimeError(f"ptxas refused {name} for {architecture}: {log}")
        size = binary.stat().st_size

    def number(pattern):
        found = re.search(pattern, log)
        return int(found[1]) if found else 0

    return Compiled(
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        shared_bytes=shared_bytes,
        sass_bytes=size,
        tensor_core=re.search(r"\b(mma\.sync|wgmma\.mma_async)", ptx) is not None,
    )
