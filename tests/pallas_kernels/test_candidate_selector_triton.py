"""The selector's Triton kernel: interpreted against the reference, and compiled; no GPU."""

import functools
import importlib.util
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from pallas_kernels import cuda_compile, cuda_topology, registry
from pallas_kernels.candidate_selector import candidate_selector
from pallas_kernels.candidate_selector.triton import NUM_WARPS, sizes
from pallas_kernels.shapes import GEOMETRIES
from tests.pallas_kernels.tools import needs_plugin, needs_triton

ROOT = pathlib.Path(__file__).parents[2]
NAMES = (
    "scores", "candidates", "projected", "predecessor", "successor", "anchor", "temperature",
    "uniforms",
)  # fmt: skip



def case(seed, rows, columns, ranks, rank, temperature):
    """Random arguments by name; codebooks of 64 tokens."""
    rng = np.random.default_rng(seed)
    lists = (rows, columns, ranks)
    ids = [[rng.choice(64, ranks, replace=False) for _ in range(columns)] for _ in range(rows)]
    arrays = (
        -np.sort(-rng.normal(size=lists)),
        np.asarray(ids, np.int32),
        rng.normal(size=(rows, columns, rank)) / np.sqrt(rank),
        *rng.normal(size=(2, 64, rank)),
        rng.integers(64, size=rows).astype(np.int32),
        np.broadcast_to(temperature, (rows,)),
        rng.uniform(size=(rows, columns)),
    )
    arrays = [x if x.dtype == np.int32 else np.float32(x) for x in arrays]
    return dict(zip(NAMES, arrays, strict=True))


@pytest.fixture(scope="module")
def cases():
    mixed = [0.0, 0.7, -1.0, 1.3]
    ties = case(3, 2, 1, 4, 3, 0.0)
    ties["projected"][:] = 0
    ties["scores"][:] = [[[1, 3, 3, 2]], [[-np.inf, -4, -4, -np.inf]]]
    edges = case(4, 3, 1, 4, 3, 1.0)
    edges["projected"][:] = 0
    edges["scores"][:] = [[[0, 0, 0, 0]], [[-1e4, 0, 0, -np.inf]], [[-np.inf, -1e4, 7, -1e4]]]
    edges["uniforms"][:, 0] = [0.25, 0.0, np.nextafter(np.float32(1), np.float32(0))]
    outside = case(5, 2, 2, 4, 8, 1.0)
    outside["anchor"][:] = [64, -1]
    cases = {
        "real": case(0, 4, 7, 16, 256, mixed),
        "odd": case(1, 4, 5, 5, 12, mixed),
        "single": case(2, 2, 3, 1, 1, [0.0, 1.0]),
        "ties": ties,
        "edges": edges,
        "outside": outside,
    }
    for name, arrays in cases.items():
        arrays["bfloat16"] = np.array(name == "real")
    return cases


@pytest.fixture(scope="module")
def interpreted(cases, tmp_path_factory):
    folder = tmp_path_factory.mktemp("triton")
    flat = {f"{name}.{k}": x for name, arrays in cases.items() for k, x in arrays.items()}
    np.savez(folder / "cases.npz", **flat)
    script = pathlib.Path(__file__).with_name("triton_interpreter.py")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, script, folder / "cases.npz", folder / "results.npz"],
        env=os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return np.load(folder / "results.npz")


@needs_triton
@pytest.mark.parametrize("name", ["real", "odd", "single", "ties", "edges"])
def test_interpreted_kernel_equals_the_reference(cases, interpreted, name):
    arrays = dict(cases[name])
    if arrays.pop("bfloat16"):
        for argument in ("projected", "predecessor", "successor"):
            arrays[argument] = jax.numpy.asarray(arrays[argument], jax.numpy.bfloat16)
    reference = jax.jit(functools.partial(candidate_selector, implementation="reference"))
    tokens, choices, q = reference(*(arrays[n] for n in NAMES))
    np.testing.assert_array_equal(interpreted[f"{name}.choices"], choices)
    np.testing.assert_array_equal(interpreted[f"{name}.tokens"], tokens)
    # Float32 sums of up to 256 products in another order.
    np.testing.assert_allclose(interpreted[f"{name}.q"], q, rtol=3e-5, atol=1e-6)


@needs_triton
def test_an_id_outside_the_codebook_reads_nobodys_row(interpreted):
    assert np.isnan(interpreted["outside.q"][:, 0]).all()
    choices = interpreted["outside.choices"]
    assert ((0 <= choices) & (choices < 4)).all()


@needs_triton
@pytest.mark.parametrize("gpu", [cuda_compile.A100, cuda_compile.H200], ids=lambda g: g.device_kind)
@pytest.mark.parametrize("geometry", [g for g in GEOMETRIES if g.draft.selector_rank],
                         ids=lambda g: g.name)  # fmt: skip
def test_compiles_at_real_shapes(gpu, geometry, tmp_path, monkeypatch):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pallas_kernels.candidate_selector.triton_kernel import candidate_walk

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    draft = geometry.draft
    real = "*bf16" if geometry.dtype == "bfloat16" else "*fp32"
    kinds = ["*fp32", "*i32", real, real, real, "*i32", "*fp32", "*fp32"]
    kinds += ["*i32", "*i32", "*fp32"]
    lists = (1, draft.columns - 1, draft.selector_top_k)
    constants = sizes(
        jax.ShapeDtypeStruct(lists, np.float32),
        jax.ShapeDtypeStruct((*lists[:2], draft.selector_rank), geometry.dtype),
        jax.ShapeDtypeStruct((geometry.target.vocabulary, draft.selector_rank), geometry.dtype),
    )
    kinds += ["constexpr"] * len(constants)
    source = ASTSource(
        candidate_walk,
        dict(zip(candidate_walk.arg_names, kinds, strict=True)),
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in range(11)},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", gpu.architecture, 32),
        options=dict(num_warps=NUM_WARPS),
    )
    facts = cuda_compile.assemble(
        "candidate_walk", compiled.asm["ptx"], compiled.metadata.shared, gpu
    )
    assert facts.spill_bytes == 0
    assert facts.shared_bytes <= gpu.shared_bytes


@needs_triton
@needs_plugin
@pytest.mark.parametrize("gpu", [cuda_compile.A100, cuda_compile.H200], ids=lambda g: g.device_kind)
def test_runs_inside_a_program(gpu):
    """As called: through jax-triton, under jit, compiled by XLA."""
    pytest.importorskip("jax_triton")
    (op,) = (c for c in registry.CASES["candidate_selector"]() if c.shape == "27b-dflash2 B=8")
    run = functools.partial(op.run, implementation="triton")
    compiled = cuda_topology.compile_program(run, *op.abstract_operands(), gpu=gpu)
    assert compiled.as_text().count('custom_call_target="triton_kernel_call') == 1


def test_missing_packages_are_named():
    if importlib.util.find_spec("jax_triton"):
        pytest.skip("jax-triton is installed")
    from pallas_kernels.candidate_selector import triton

    arrays = case(0, 1, 2, 4, 8, 0.0)
    with pytest.raises(ImportError, match="needs jax-triton"):
        triton.candidate_selector(*(arrays[n] for n in NAMES))
