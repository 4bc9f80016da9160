"""Every registered kernel at real shapes: lowers for CUDA; compiles where triton is installed."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import cuda_compile, registry
from pallas_kernels.cuda_compile import A100, H200
from pallas_kernels.shapes import GEOMETRIES
from tests.pallas_kernels.tools import needs_triton

pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)
# The batch is only a grid size: the smallest one stands for all.
CASES = {
    f"{case.op} {case.shape}": case
    for cases in registry.CASES.values()
    for case in cases()
    if case.shape.endswith("B=1")
}


def test_every_op_of_the_registry_has_real_shapes():
    for op, cases in registry.CASES.items():
        names = [(case.op, case.shape) for case in cases()]
        assert len(set(names)) == len(names)
        assert all(name.split(".")[0] == op for name, _ in names)
        assert any("27b" in shape for _, shape in names)


@pytest.mark.parametrize("name", CASES)
def test_lowers_for_cuda(name):
    case = CASES[name]
    operands = case.abstract_operands()
    # No name: on such a GPU the dispatch takes the kernel.
    kernels = cuda_compile.kernels(cuda_compile.lower(case.run, *operands, gpu=H200))
    assert kernels and all(min(kernel.grid) >= 1 for kernel in kernels)
    # What must move is at least the output and cannot exceed what the kernel moves.
    output = jax.eval_shape(case.run, *operands)
    written = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(output))
    if case.op.startswith("context_kv_materialize"):
        written = 0  # few slots of the rings that it returns
    assert written < case.minimum_bytes <= case.moved_bytes


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("gpu", [A100, H200], ids=lambda gpu: f"sm_{gpu.architecture}")
@pytest.mark.parametrize("name", CASES)
def test_compiles_without_spills(name, gpu):
    case = CASES[name]
    lowered = cuda_compile.lower(case.run, *case.abstract_operands(), gpu=gpu)
    for kernel in cuda_compile.kernels(lowered):
        compiled = cuda_compile.compile_kernel(kernel, gpu)
        assert compiled.sass_bytes > 0 and 0 < compiled.registers <= 255
        assert compiled.spill_bytes == 0 and compiled.shared_bytes <= gpu.shared_bytes


# --- the tools themselves ---


def _matrix_kernel(x_ref, y_ref, out_ref):
    out_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)


def _product(x, y, num_warps=4):
    return pl.pallas_call(
        _matrix_kernel,
        name="product",
        grid=(1,),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=3),
    )(x, y)


def test_kernels_are_found_inside_control_flow():
    def function(x):
        return jax.lax.fori_loop(0, 3, lambda _, y: _product(y, y), x)

    (kernel,) = cuda_compile.kernels(cuda_compile.lower(function, jnp.ones((32, 32)), gpu=A100))
    assert (kernel.name, kernel.num_warps, kernel.num_stages) == ("product", 4, 3)
    assert kernel.grid == (1, 1, 1) and kernel.module.startswith(b"ML\xefR")
    plain = cuda_compile.lower(jnp.sin, jnp.ones(3), gpu=A100)
    assert cuda_compile.kernels(plain) == []


@needs_triton
def test_spills_and_tensor_cores_are_seen():
    x, y = jnp.ones((128, 32), jnp.bfloat16), jnp.ones((32, 128), jnp.bfloat16)
    (kernel,) = cuda_compile.kernels(
        cuda_compile.lower(lambda x, y: _product(x, y, num_warps=1), x, y, gpu=A100)
    )
    crowded = cuda_compile.compile_kernel(kernel, A100)
    assert crowded.spill_bytes > 0 and crowded.tensor_core
    small = jnp.ones((16, 16), jnp.bfloat16)
    (kernel,) = cuda_compile.kernels(cuda_compile.lower(_product, small, small, gpu=H200))
    assert cuda_compile.compile_kernel(kernel, H200).spill_bytes == 0


# --- the shapes ---


@pytest.mark.parametrize(
    "name, draft_file, target_file",
    [
        ("27b-dflash2", "qwen3.8-27b-dflash2", "qwen3.5-27b"),
        ("35b-a3b-dflash", "qwen3.6-35b-a3b-dflash", "qwen3.5-35b-a3b"),
    ],
)
def test_shapes_are_those_of_the_configs(geometries, name, draft_file, target_file):
    (geometry,) = (g for g in GEOMETRIES if g.name == name)
    draft, target = geometry.draft, geometry.target
    config = json.loads((geometries / f"{draft_file}.json").read_text("utf-8"))
    flash = config["dflash_config"]
    local = config["layer_types"].count("sliding_attention")
    assert draft.hidden == config["hidden_size"]
    assert (draft.heads, draft.kv_heads, draft.head_dim) == (
        config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"],
    )  # fmt: skip
    assert (draft.local_layers, draft.full_layers) == (local, config["num_hidden_layers"] - local)
    assert (draft.window, draft.columns) == (config["sliding_window"], flash["block_size"])
    assert draft.conv_group == flash.get("conv_group_size", 0)
    assert draft.selector_rank == flash.get("selector_rank", 0)
    assert draft.selector_top_k == flash.get("selector_top_k", 0)

    config = json.loads((geometries / f"{target_file}.json").read_text("utf-8"))["text_config"]
    layers = config["num_hidden_layers"]
    assert (target.hidden, target.vocabulary) == (config["hidden_size"], config["vocab_size"])
    assert (target.heads, target.kv_heads, target.head_dim) == (
        config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"],
    )  # fmt: skip
    assert (target.full_layers, target.gdn_layers) == (layers // 4, layers - layers // 4)
    assert target.gdn_key_heads == config["linear_num_key_heads"]
    assert target.gdn_value_heads == config["linear_num_value_heads"]
    assert target.gdn_head_dim == config["linear_key_head_dim"] == config["linear_value_head_dim"]
