"""The round as programs with abstract weights, and what is read off compiled ones."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.config import parse_draft_config, parse_target_config
from dflash_jax.io.names import tensor_table
from dflash_jax.state.sequence import init_sequences
from experiments import round_figures, round_programs
from experiments.configs import qwen27b, tiny
from pallas_kernels import cuda_topology
from pallas_kernels.cuda_topology import Program
from tests.pallas_kernels.tools import needs_plugin


@pytest.mark.parametrize(
    "parse, file, config",
    [
        (parse_target_config, "qwen3.5-27b", qwen27b.TARGET),
        (parse_draft_config, "qwen3.8-27b-dflash2", qwen27b.DFLASH2),
    ],
)
def test_the_27b_geometry_is_that_of_the_configs(geometries, parse, file, config):
    assert parse(json.loads((geometries / f"{file}.json").read_text("utf-8"))) == config


def test_abstract_weights_are_a_checkpoint_s():
    params = round_programs.abstract_params(qwen27b.TARGET, "bfloat16")
    sizes = [x.size for x in jax.tree.leaves(params)]
    assert sum(sizes) == sum(tensor.size for tensor in tensor_table(qwen27b.TARGET))
    mixer = params["model"]["layers_0"]["linear_attn"]
    assert mixer["A_log"].dtype == jnp.float32
    assert mixer["in_proj_qkv"]["weight"].dtype == jnp.bfloat16


def test_a_round_of_abstract_weights_goes_round():
    """What a program returns is what the next one takes, at the state's own shapes."""
    spec = round_programs.make_spec(tiny.TARGET, tiny.DFLASH2, "float32")
    draft, verify, commit = round_programs.parts(spec, 2, 256)
    assert (draft.name, verify.name, commit.name) == round_programs.NAMES
    state, proposal = jax.eval_shape(draft.function, *draft.operands)
    real = init_sequences(
        tiny.TARGET, tiny.DFLASH2, jnp.zeros(2, jnp.uint32), 256, spec.width, jnp.float32
    )
    shapes = jax.tree.map(jnp.shape, real)
    assert jax.tree.map(jnp.shape, state) == shapes
    verified = jax.eval_shape(verify.function, verify.operands[0], state, proposal)
    assert verified.logits.shape == (2, 8, 1024)
    assert jax.tree.map(jnp.shape, jax.eval_shape(commit.function, *commit.operands)) == shapes


# --- what is read off a compiled program ---

HLO = """
HloModule jit_f, is_scheduled=true

%fused (p: bf16[2,4]) -> bf16[2,4] {
  %p = bf16[2,4]{1,0} parameter(0)
  ROOT %copy.9 = bf16[2,4]{1,0} copy(%p)
}

%body (c: (s32[], bf16[2,4])) -> (s32[], bf16[2,4]) {
  %c = (s32[], bf16[2,4]{1,0}) parameter(0)
  %x = bf16[2,4]{1,0} get-tuple-element(%c), index=1
  %copy.1 = bf16[2,4]{1,0} copy(%x), metadata={op_name="a (b"}
  ROOT %t = (s32[], bf16[2,4]{1,0}) tuple(%i, %copy.1)
}

ENTRY %main (ring: bf16[2,4], x: f32[8]) -> (bf16[2,4], f32[8]) {
  %ring = bf16[2,4]{1,0} parameter(0)
  %f = bf16[8]{0} fusion(%ring), kind=kLoop, calls=%fused
  %k = (bf16[1,8]{1,0}, /*index=1*/f32[8]{0}) custom-call(%f), \
custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "walk", num_warps = 1 : i32}
  ROOT %out = (bf16[2,4]{1,0}, f32[8]{0}) tuple(%ring, %y)
}
"""


class FakeCompiled:
    """Text and memory of a program, as `jax.stages.Compiled` gives them."""

    def as_text(self):
        return HLO

    def memory_analysis(self):
        names = ("argument", "output", "alias", "temp")
        values = {f"{name}_size_in_bytes": i for i, name in enumerate(names, 1)}
        return type("Memory", (), values)


def test_operations_are_those_outside_fusions():
    program = cuda_topology.inspect(FakeCompiled())
    assert (program.argument_bytes, program.output_bytes) == (1, 2)
    assert (program.alias_bytes, program.temporary_bytes) == (3, 4)
    assert program.kernels == {"walk": 1}
    assert program.made == {
        ("copy", "bf16[2,4]"): 1,
        ("fusion", "bf16[8]"): 1,
        ("custom-call", "bf16[1,8]"): 1,
        ("custom-call", "f32[8]"): 1,
    }
    # By size and dtype: a kernel may see the array in another shape.
    ring = jax.ShapeDtypeStruct((4, 2), jnp.bfloat16)
    assert program.makers(ring) == {"copy": 1, "fusion": 1, "custom-call": 1}
    assert program.makers(jax.ShapeDtypeStruct((8,), jnp.float16)) == {}


def test_copies_and_lost_memory_are_failures():
    ring = jax.ShapeDtypeStruct((4, 2), jnp.bfloat16)
    part = round_programs.Part("draft", None, (), (1,), {"ring": ring})
    good = Program(0, 0, 16, 0, {}, {("custom-call", "bf16[8]"): 1})
    assert part.failures(good) == []
    copied = dataclasses.replace(good, made={("copy", "bf16[4,2]"): 2})
    assert part.failures(copied) == ["draft: 2 x copy of the ring"]
    (lost,) = part.failures(dataclasses.replace(good, alias_bytes=12))
    assert "12 bytes are updated in place, expected at least the 16 of ring" in lost
    # A program that only reads the state may not make such an array at all.
    (made,) = dataclasses.replace(part, donate=()).failures(good)
    assert made == "draft: 1 x custom-call of the ring"


def test_names_are_checked():
    spec = round_programs.make_spec(tiny.TARGET, tiny.DFLASH2, "float32")
    with pytest.raises(ValueError, match="--gpus: got T4, expected some of A100, H200"):
        round_figures.measure(spec, 1, 64, gpus=["T4"], programs=["draft"])
    with pytest.raises(ValueError, match="--programs: got accept, .*verify"):
        round_figures.measure(spec, 1, 64, gpus=["A100"], programs=["accept"])


@needs_plugin
@pytest.mark.slow
@pytest.mark.parametrize("gpu", round_figures.GPUS)
@pytest.mark.parametrize("program", round_programs.NAMES)
def test_the_27b_round_compiles_and_updates_in_place(program, gpu):
    spec = round_programs.make_spec(qwen27b.TARGET, qwen27b.DFLASH2, "bfloat16")
    (row,) = round_figures.measure(spec, 1, 32768, gpus=[gpu], programs=[program])
    assert row["failures"] == []
    kernels = {
        # Two convolutions in each of five layers; context of all layers in one.
        "draft": {
            "dynamic_conv_prepare": 10,
            "dynamic_conv_finish": 10,
            "context_kv_materialize": 1,
            "sliding_window_attention": 5,
            "sliding_window_attention_combine": 5,
            "candidate_lattice": 1,
            "candidate_walk": 1,
        },
        "verify": {
            "gated_delta_verify": 48,
            "paged_attention": 16,
            "paged_attention_combine": 16,
        },
        "commit": {"gated_delta_fold": 1},
    }
    assert row["kernels"] == kernels[program]
    # Measured: 11, 75 and 3 MB; a layer's four projections have 169 MB, a page pool 1,074 MB.
    assert row["temporary_bytes"] < 150e6


def test_the_script_says_what_is_missing(script, monkeypatch, capsys):
    missing = "the plugin is not here"
    monkeypatch.setattr(cuda_topology, "missing_plugin", lambda: missing)
    platforms = jax.config.jax_platforms
    try:
        assert script("compile_round")() == 2
    finally:
        jax.config.update("jax_platforms", platforms)
    assert capsys.readouterr().err == f"error: {missing}\n"
