"""The name tables: shapes from the config, places in the tree, names met in files."""

import pathlib

import pytest
import safetensors

from dflash_jax.config import parse_draft_config, parse_target_config
from dflash_jax.io.names import match_names, tensor_table

TESTS = pathlib.Path(__file__).parents[1]
GEOMETRIES = TESTS / "geometries"
FIXTURES = TESTS / "fixtures"


def parse(directory):
    target = pathlib.Path(directory).name.startswith("dense_text")
    return parse_target_config(directory) if target else parse_draft_config(directory)


def shapes(config):
    return {spec.name: spec.shape for spec in tensor_table(config)}


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [
        ("qwen3.8-27b-dflash2", 81, 1_924_404_480),
        ("qwen3.6-35b-a3b-dflash", 69, 385_906_176),
        ("qwen3.6-27b-dflash", 58, 1_730_213_120),
    ],
)
def test_official_drafts_have_their_published_size(name, tensors, parameters):
    table = tensor_table(parse_draft_config(GEOMETRIES / f"{name}.json"))
    assert len(table) == tensors
    assert sum(spec.size for spec in table) == parameters


def test_official_dflash2_parts():
    table = tensor_table(parse_draft_config(GEOMETRIES / "qwen3.8-27b-dflash2.json"))
    convolutions = sum(spec.size for spec in table if "_conv." in spec.name)
    selector = sum(spec.size for spec in table if spec.name.startswith("candidate_selector."))
    assert (convolutions, selector) == (65_740_800, 128_450_560)


def test_official_dflash2_shapes():
    found = shapes(parse_draft_config(GEOMETRIES / "qwen3.8-27b-dflash2.json"))
    expected = {
        "fc.weight": (5120, 25600),
        "hidden_norm.weight": (5120,),
        "norm.weight": (5120,),
        "layers.4.self_attn.q_proj.weight": (4096, 5120),
        "layers.4.self_attn.k_proj.weight": (1024, 5120),
        "layers.4.self_attn.o_proj.weight": (5120, 4096),
        "layers.4.self_attn.k_norm.weight": (128,),
        "layers.0.mlp.down_proj.weight": (5120, 17408),
        "layers.0.attention_conv.base_kernel": (2, 2, 5120),
        "layers.0.mlp_conv.kernel_projection.weight": (1280, 5120),
        "candidate_selector.hidden_projection.weight": (256, 5120),
        "candidate_selector.predecessor_codebook": (248320, 256),
    }
    assert {name: found[name] for name in expected} == expected
    assert not any(name.startswith("layers.5.") for name in found)


def test_official_target_shapes():
    config = parse_target_config(GEOMETRIES / "qwen3.5-27b.json")
    found = shapes(config)
    expected = {
        "model.embed_tokens.weight": (248320, 5120),
        "lm_head.weight": (248320, 5120),
        "model.layers.0.linear_attn.in_proj_qkv.weight": (10240, 5120),
        "model.layers.0.linear_attn.in_proj_z.weight": (6144, 5120),
        "model.layers.0.linear_attn.in_proj_b.weight": (48, 5120),
        "model.layers.0.linear_attn.conv1d.weight": (10240, 1, 4),
        "model.layers.0.linear_attn.A_log": (48,),
        "model.layers.0.linear_attn.norm.weight": (128,),
        "model.layers.0.linear_attn.out_proj.weight": (5120, 6144),
        "model.layers.3.self_attn.q_proj.weight": (12288, 5120),
        "model.layers.3.self_attn.k_proj.weight": (1024, 5120),
        "model.layers.3.self_attn.o_proj.weight": (5120, 6144),
        "model.layers.63.self_attn.q_norm.weight": (256,),
    }
    assert {name: found[name] for name in expected} == expected
    assert len(found) == 3 + 48 * (5 + 9) + 16 * (5 + 6)


@pytest.mark.parametrize(
    "folder", ["dense_text", "dense_text_tied", "mid_dense_v1", "mid_dense_v2", "draft_v2_default"]
)
def test_tables_are_exactly_what_the_reference_packages_wrote(folder):
    config = parse(FIXTURES / folder)
    with safetensors.safe_open(FIXTURES / folder / "model.safetensors", "numpy") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    bare = {name.replace("_codebook.weight", "_codebook"): s for name, s in written.items()}
    assert shapes(config) == bare


def test_paths_and_float32_parameters():
    paths = {spec.name: spec.path for spec in tensor_table(parse(FIXTURES / "dense_text"))}
    assert paths["model.layers.7.self_attn.q_proj.weight"] == (
        "model", "layers_7", "self_attn", "q_proj", "weight",
    )  # fmt: skip
    assert paths["model.layers.0.linear_attn.A_log"] == (
        "model", "layers_0", "linear_attn", "A_log",
    )  # fmt: skip
    assert paths["lm_head.weight"] == ("lm_head", "weight")
    kept = {s.name.rsplit(".")[-1] for s in tensor_table(parse(FIXTURES / "dense_text"))
            if s.keep_float32}  # fmt: skip
    assert kept == {"A_log", "dt_bias"}
    draft = {spec.name: spec.path for spec in tensor_table(parse(FIXTURES / "mid_dense_v2"))}
    assert draft["layers.0.mlp_conv.base_kernel"] == ("layers_0", "mlp_conv", "base_kernel")
    assert draft["candidate_selector.successor_codebook"] == (
        "candidate_selector", "successor_codebook",
    )  # fmt: skip


def names(config):
    return [spec.name for spec in tensor_table(config)]


def test_multimodal_prefix_and_skipped_parts():
    config = parse(FIXTURES / "dense_text")
    multimodal = [name.replace("model.", "model.language_model.", 1) for name in names(config)]
    others = ["model.visual.pos_embed.weight", "mtp.fc.weight"]
    matched = match_names(config, multimodal + others)
    assert matched.missing == () and matched.extra == ()
    assert matched.skipped == ("model.visual.pos_embed.weight", "mtp.fc.weight")
    assert {spec.name: found for spec, found in matched.found.items()} == {
        name: (file_name,) for name, file_name in zip(names(config), multimodal, strict=True)
    }


def test_missing_and_extra():
    config = parse(FIXTURES / "mid_dense_v1")
    given = [n for n in names(config) if n != "fc.weight"]
    given += ["layers.4.mlp.up_proj.weight", "mtp.fc.weight"]
    matched = match_names(config, given)
    assert [spec.name for spec in matched.missing] == ["fc.weight"]
    assert matched.extra == ("layers.4.mlp.up_proj.weight", "mtp.fc.weight")  # a draft has no mtp


def test_spellings_of_codebooks_and_of_a_tied_head():
    config = parse(FIXTURES / "mid_dense_v2")
    both = names(config) + ["candidate_selector.successor_codebook.weight"]
    spec = next(s for s in tensor_table(config) if s.name.endswith("successor_codebook"))
    assert match_names(config, both).found[spec] == (spec.name, f"{spec.name}.weight")

    tied = parse(FIXTURES / "dense_text_tied")
    assert "lm_head.weight" not in names(tied)
    matched = match_names(tied, [*names(tied), "lm_head.weight"])
    assert matched.extra == ()
    assert ("lm_head.weight", "model.embed_tokens.weight") in matched.found.values()
