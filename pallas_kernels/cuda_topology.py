"""Compiles whole programs with XLA for a GPU that is not here.

JAX's CUDA plugin holds XLA's compiler for NVIDIA GPUs, which needs the description of a device and
not the device. What it says of memory and of buffers that are updated in place is what a GPU
would run; its choice of matrix-product kernels is not, since it could not time any.
"""

import collections
import dataclasses
import importlib.util
import math
import pathlib
import re
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from pallas_kernels.cuda_compile import A100, H200, Gpu

_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")


@dataclasses.dataclass(frozen=True)
class _Chip:
    """What XLA asks of a chip besides `Gpu`: NVIDIA's datasheets and `deviceQuery`."""

    memory_bytes: int
    shared_bytes_per_core: int
    l2_bytes: int
    float32_units_per_core: int
    clock_ghz: float
    feature: str  # whether instructions of this very architecture (sm_90a) may be used


_CHIPS = {
    A100.device_kind: _Chip(85 * 10**9, 164 * 1024, 40 << 20, 64, 1.41, "NONE"),
    H200.device_kind: _Chip(141 * 10**9, 228 * 1024, 50 << 20, 128, 1.98, "ACCELERATED_FEATURES"),
}


@dataclasses.dataclass(frozen=True)
class Program:
    """What a compiled program needs and does; bytes of device memory.

    Attributes:
      argument_bytes: all inputs.
      output_bytes: all outputs, those in the memory of an input included.
      alias_bytes: outputs that are in the memory of an input.
      temporary_bytes: scratch besides inputs and outputs, at its highest.
      kernels: launches of Triton kernels by name, e.g. {"gated_delta_fold": 1}.
      made: (operation, shape as XLA writes it) -> how often an operation outside fusions makes
        such an array, e.g. {("copy", "bf16[5,1,2048,8,128]"): 1}. Inputs, tuples, views and other
        names of an array that is there already are left out.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    kernels: dict[str, int]
    made: dict[tuple[str, str], int]

    def makers(self, array) -> dict[str, int]:
        """Operations that make an array of this size and dtype in any shape, and how often."""
        found = collections.Counter()
        for (operation, shape), count in self.made.items():
            dtype, sizes = shape.rstrip("]").split("[")
            size = math.prod(int(size) for size in sizes.split(",") if size)
            if (dtype, size) == (_DTYPES[array.dtype.name], array.size):
                found[operation] += count
        return dict(found)


# XLA's names of the dtypes that large arrays have here.
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int32": "s32"}


def missing_plugin() -> str | None:
    """None if `compile_program` can run here, else what is missing and how to get it."""
    found = importlib.util.find_spec("jax_plugins") and any(map(importlib.util.find_spec, _PLUGINS))
    if not found:
        return (
            "JAX's CUDA plugin is not installed: pip install --no-deps "
            f"jax-cuda12-plugin=={jax.__version__} jax-cuda12-pjrt=={jax.__version__}"
        )
    if (platforms := jax.config.jax_platforms) != "cpu":
        return f"without a GPU the plugin loads under JAX_PLATFORMS=cpu only; got {platforms!r}"
    return None


def compile_program(
    function: Callable,
    *operands,
    gpu: Gpu,
    donate: tuple[int, ...] = (),
    options: Mapping[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compiles `function(*operands)` as if `gpu` were the only device.

    Args:
      operands: arrays or `jax.ShapeDtypeStruct`s in any structure.
      gpu: one of `cuda_compile.A100` and `H200`.
      donate: operands whose memory the outputs may take.
      options: XLA's, by name.

    Raises:
      RuntimeError: XLA refuses the program: a kernel that spills registers or needs too much
        shared memory, say.
    """
    topology = topologies.get_topology_desc(
        "", platform="cuda", topology="1x1x1", target_config=_target_config(gpu)
    )
    place = SingleDeviceSharding(topology.devices[0])
    described = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), operands
    )
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        lowered = jax.jit(function, donate_argnums=donate).trace(*described).lower()
    options = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True, **(options or {})}
    with tempfile.TemporaryDirectory() as folder:
        return lowered.compile(compiler_options=options | _compilers(pathlib.Path(folder)))


def inspect(compiled: jax.stages.Compiled) -> Program:
    """Reads memory use and operations off a compiled program."""
    memory, text = compiled.memory_analysis(), compiled.as_text()
    kernels, made = collections.Counter(), collections.Counter()
    for operation, shapes, line in _operations(text):
        if operation == "custom-call" and '"__gpu$xla.gpu.triton"' in line:
            kernels[re.search(r'name = "(\w+)"', line)[1]] += 1
        made.update((operation, shape) for shape in shapes)
    return Program(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        kernels=dict(kernels),
        made=dict(made),
    )


# Other names of memory that is there already, not new arrays.
_NAMES = {"parameter", "get-tuple-element", "bitcast", "tuple", "while", "conditional", "call"}


def _operations(text: str):
    """(operation, shapes that it makes, line) of every instruction outside fusions."""
    inside_fusion = False
    fused = set(re.findall(r"fusion\(.*calls=%?([\w.\-]+)", text))
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            inside_fusion = header[1] in fused
            continue
        found = re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(", line)
        if found and not inside_fusion and found[2] not in _NAMES:
            yield found[2], re.findall(r"\w+\[[\d,]*\]", found[1]), line


def _compilers(folder: pathlib.Path) -> dict[str, str]:
    """Options that lead XLA to the assembler and device library of the `triton` package.

    Without that package XLA looks for an installed CUDA toolkit.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None:
        return {}
    package = pathlib.Path(spec.origin).parent / "backends" / "nvidia"
    for link, file in (
        ("bin/ptxas", "bin/ptxas-blackwell"),  # takes every architecture and every PTX version
        ("nvvm/libdevice/libdevice.10.bc", "lib/libdevice.10.bc"),
    ):
        (folder / link).parent.mkdir(parents=True)
        (folder / link).symlink_to(package / file)
    return {"xla_gpu_cuda_data_dir": str(folder)}


def _target_config(gpu: Gpu) -> str:
    """XLA's description of the device: text form of `stream_executor.GpuTargetConfigProto`."""
    chip, major = _CHIPS[gpu.device_kind], math.floor(float(gpu.compute_capability))
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {chip.shared_bytes_per_core}
  shared_memory_per_block_optin: {gpu.shared_bytes}
  core_count: {gpu.num_cores} fpus_per_core: {chip.float32_units_per_core}
  clock_rate_ghz: {chip.clock_ghz} memory_bandwidth: {int(gpu.bandwidth)}
  l2_cache_size: {chip.l2_bytes} device_memory_size: {chip.memory_bytes}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 device_address_bits: 64
  cuda_compute_capability {{ major: {major} minor: 0 feature_extension: {chip.feature} }}
  name: "{gpu.device_kind}" device_vendor: "NVIDIA Corporation"
  driver_version: "13.0.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA" device_description_str: "{gpu.device_kind}"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
"""
