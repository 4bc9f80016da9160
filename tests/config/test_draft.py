"""Parsing of draft configurations."""

import copy
import dataclasses
import json
import pathlib

import pytest
from absl import logging

from dflash_jax.config import (
    Causality,
    ConfigError,
    DraftConfig,
    draft_to_json,
    parse_draft_config,
)

TESTS = pathlib.Path(__file__).parents[1]
GEOMETRIES = TESTS / "geometries"
S, F = "sliding_attention", "full_attention"

V1 = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "layer_types": [S, S, S, F],
    "sliding_window": 16,
    "use_sliding_window": True,
    "num_target_layers": 8,
    "dflash_config": {"block_size": 8, "mask_token_id": 499, "target_layer_ids": [1, 3, 5]},
}
SELECTOR = {"conv_kernel_size": 3, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
PARSED = DraftConfig(
    dflash2=False, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, rms_norm_eps=1e-6, rope_theta=1e6,
    layer_types=(S, S, S, F), sliding_window=16, target_layer_ids=(1, 3, 5), mask_token_id=499,
    block_size=8, vocab_size=512, num_target_layers=8,
)  # fmt: skip
PARSED2 = dataclasses.replace(PARSED, dflash2=True, **SELECTOR)


def v1(without=(), nested=None, **fields):
    """`V1` with fields replaced; `nested` replaces entries of `dflash_config` (None removes)."""
    values = copy.deepcopy(V1) | fields
    for name, value in (nested or {}).items():
        if value is None:
            values["dflash_config"].pop(name, None)
        else:
            values["dflash_config"][name] = value
    for name in without:
        del values[name]
    return values


def v2(nested=None, **fields):
    fields = {"architectures": ["DFlash2DraftModel"]} | fields
    return v1(nested={**SELECTOR, **(nested or {})}, **fields)


def flat(values):
    """The same config with `dflash_config` and `rope_parameters` dissolved."""
    values = copy.deepcopy(values)
    values |= values.pop("dflash_config")
    values["rope_theta"] = values.pop("rope_parameters")["rope_theta"]
    return values


@pytest.mark.smoke
def test_parses_both_models_field_by_field():
    assert parse_draft_config(V1) == PARSED
    assert parse_draft_config(v2()) == PARSED2
    assert (PARSED.name, PARSED2.name) == ("DFlash", "DFlash2")
    assert PARSED2.conv_groups == 4
    assert (PARSED.local_layers, PARSED.full_layers) == ((0, 1, 2), (3,))


@pytest.mark.parametrize(("values", "expected"), [(V1, PARSED), (v2(), PARSED2)])
def test_nested_flat_and_both_are_the_same_config(values, expected):
    spellings = [
        flat(values),
        flat(values) | {"rope_parameters": {"rope_type": "default"}},  # dict without theta
        flat(values) | values,  # both present and equal
        flat(values) | {"rope_scaling": None},
    ]
    assert all(parse_draft_config(spelling) == expected for spelling in spellings)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("block_size", 9),
        ("mask_token_id", 498),
        ("target_layer_ids", [1, 3, 6]),
        ("conv_kernel_size", 2),
        ("conv_group_size", 8),
        ("selector_rank", 9),
        ("selector_top_k", 5),
    ],
)
def test_nested_and_flat_that_differ_name_both_places(name, other):
    with pytest.raises(ConfigError) as error:
        parse_draft_config(v2(**{name: other}))
    assert f"config: dflash_config.{name} is " in str(error.value)
    assert f"config: {name} is " in str(error.value)


@pytest.mark.parametrize("name", ["mask_token_id", "target_layer_ids"])
def test_missing_draft_field_names_both_places(name):
    with pytest.raises(ConfigError, match=f"missing field '{name}'") as error:
        parse_draft_config(v1(nested={name: None}))
    assert f"dflash_config.{name}" in str(error.value)
    assert f"'config: {name}'" in str(error.value)


def test_missing_theta_names_its_places():
    with pytest.raises(ConfigError, match="missing field 'rope_theta'") as error:
        parse_draft_config(v1(without=["rope_parameters"]))
    assert "rope_parameters.rope_theta" in str(error.value)
    assert "'config: rope_theta'" in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "sliding_window",
    ],
)  # fmt: skip
def test_every_size_is_required(name):
    with pytest.raises(ConfigError, match=f"missing field '{name}'"):
        parse_draft_config(v1(without=[name]))


def test_absent_block_size_is_the_official_default_and_said(caplog):
    logging.set_verbosity(logging.INFO)
    with caplog.at_level("INFO", logger="absl"):
        assert parse_draft_config(v1(nested={"block_size": None})).block_size == 16
    assert "dflash_config.block_size" in caplog.text and "taking 16" in caplog.text
    with pytest.raises(ConfigError, match="block_size is 1, expected at least 2"):
        parse_draft_config(v1(nested={"block_size": 1}))


# --- rotary fields ---


def test_nested_theta_wins_over_a_stale_flat_one_and_says_so(caplog):
    logging.set_verbosity(logging.INFO)
    with caplog.at_level("INFO", logger="absl"):
        assert parse_draft_config(v1(rope_theta=1e4)) == PARSED
    assert "rope_theta = 10000.0 is ignored" in caplog.text


def test_legacy_theta_stands_between():
    legacy = dict(rope_scaling={"rope_theta": 5e5, "rope_type": "default"}, rope_theta=1e4)
    assert parse_draft_config(v1(**legacy)).rope_theta == 1e6
    assert parse_draft_config(v1(**legacy, without=["rope_parameters"])).rope_theta == 5e5


def test_draft_rotates_the_whole_head_unless_its_own_config_says_otherwise():
    assert parse_draft_config(V1).rotary_dim == 32
    rope = {"rope_theta": 1e6, "partial_rotary_factor": 0.5}
    half = parse_draft_config(v1(rope_parameters=rope))
    assert (half.partial_rotary_factor, half.rotary_dim) == (0.5, 16)


# --- attention ---


@pytest.mark.parametrize(
    ("stated", "expected"),
    [(True, Causality.CAUSAL), (False, Causality.NON_CAUSAL), (None, Causality.NON_CAUSAL)],
)
def test_causality(stated, expected):
    config = parse_draft_config(v1(is_causal=stated))
    assert config.causality is expected
    assert config.layer_is_causal(0) is (expected is Causality.CAUSAL)


def test_absent_causality_is_a_choice_that_a_stated_one_overrides():
    choice = dict(absent_causality=Causality.SLIDING_CAUSAL)
    config = parse_draft_config(V1, **choice)
    assert [config.layer_is_causal(layer) for layer in range(4)] == [True, True, True, False]
    stated = parse_draft_config(v1(is_causal=False), **choice)
    assert stated.causality is Causality.NON_CAUSAL


def test_absent_layer_types_follow_the_qwen3_rule():
    def layers(**fields):
        config = parse_draft_config(v1(without=["layer_types"], **fields))
        return config.layer_types, config.sliding_window

    assert layers(use_sliding_window=False) == ((F,) * 4, None)
    assert layers(use_sliding_window=None) == ((F,) * 4, None)
    assert layers(sliding_window=None) == ((F,) * 4, None)
    assert layers(max_window_layers=1) == ((F, S, S, S), 16)
    assert layers() == ((F,) * 4, None)  # the class default leaves 28 layers full


def test_window_is_kept_only_where_a_layer_slides():
    full = parse_draft_config(v1(layer_types=[F] * 4, use_sliding_window=None))
    assert full.sliding_window is None and full.local_layers == ()
    absent = parse_draft_config(v1(without=["use_sliding_window"]))
    assert absent == PARSED


# --- refused ---


@pytest.mark.parametrize("architectures", [["LlamaModel"], [], ["DFlashDraftModel"] * 2])
def test_unknown_architecture_lists_the_known(architectures):
    with pytest.raises(ConfigError, match="DFlashDraftModel, DFlash2DraftModel"):
        parse_draft_config(v1(architectures=architectures))


@pytest.mark.parametrize("name", SELECTOR)
def test_architecture_and_fields_must_tell_the_same_story(name):
    with pytest.raises(ConfigError, match=f"{name} is a DFlash2 field"):
        parse_draft_config(v1(nested={name: SELECTOR[name]}))
    with pytest.raises(ConfigError, match=f"{name} is a DFlash2 field"):
        parse_draft_config(v1(**{name: SELECTOR[name]}))
    with pytest.raises(ConfigError, match=f"missing field '{name}', which 'DFlash2DraftModel'"):
        parse_draft_config(v2(nested={name: None}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (v1(attention_bias=True), "attention_bias is True"),
        (v1(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (v1(nested={"sample_from_anchor": True}), "sample_from_anchor is True"),
        (v1(sample_from_anchor=True), "sample_from_anchor is True"),
        (v1(rope_parameters={"rope_type": "yarn", "rope_theta": 1e6}), "rope_type is 'yarn'"),
        (v1(rope_scaling={"type": "linear", "factor": 2.0}), r"rope_scaling\.type is 'linear'"),
        (v1(draft_vocab_size=32000), "draft_vocab_size is 32000.*reduced head"),
        (v1(quantization_config={"bits": 4}), "quantized weights are not supported"),
        (v1(nested={"mask_token_id": -1}), "mask_token_id is -1, expected a token id"),
        (v1(nested={"mask_token_id": True}), "mask_token_id is True, expected a token id"),
        (v1(nested={"target_layer_ids": []}), r"dflash_config\.target_layer_ids is empty"),
        (v1(nested={"target_layer_ids": "1,3"}), "expected a list of integers"),
        (v1(layer_types=[S] * 3), "has 3 entries but num_hidden_layers is 4"),
        (v1(layer_types=[S, S, S, "linear_attention"]), r"layer_types\[3\] is"),
        (v1(use_sliding_window=False), "conflict: .*layer_types .*use_sliding_window is false"),
        (v1(sliding_window=0), "sliding_window is 0, expected a positive integer"),
        (v1(num_key_value_heads=3), "num_attention_heads is 4, not a multiple of .* 3"),
        (v2(nested={"conv_group_size": 24}), "hidden_size is 64, not a multiple of .* 24"),
        (v1(final_logit_softcapping=-1.0), "final_logit_softcapping is -1"),
        (v1(dflash_config=7), "dflash_config is 7, expected an object"),
        (v1(is_causal="false"), "is_causal is 'false', expected true or false"),
    ],
)
def test_refuses(values, message):
    with pytest.raises(ConfigError, match=message):
        parse_draft_config(values)


# --- optional factors and published geometries ---


def test_optional_factors_at_either_level():
    factors = {
        "input_embedding_scale": 2.0,
        "output_multiplier": 0.196,
        "sample_from_anchor": False,
    }
    cap = {"final_logit_softcapping": 20.0}
    for values in (v1(nested=factors | cap), v1(**factors, **cap), v1(nested=factors, **cap)):
        config = parse_draft_config(values)
        assert config.input_embedding_scale == 2.0
        assert config.output_multiplier == 0.196
        assert config.final_logit_softcapping == 20.0
    assert parse_draft_config(v1(final_logit_softcapping=0)).final_logit_softcapping is None


def test_official_dflash2():
    config = parse_draft_config(GEOMETRIES / "qwen3.8-27b-dflash2.json")
    assert config.dflash2 and config.causality is Causality.NON_CAUSAL
    assert config.local_layers == (0, 1, 2, 3, 4) and config.full_layers == ()
    assert config.target_layer_ids == (5, 19, 33, 47, 61)
    assert (config.mask_token_id, config.block_size, config.sliding_window) == (248070, 8, 2048)
    assert (config.conv_kernel_size, config.conv_group_size, config.conv_groups) == (2, 16, 320)
    assert (config.selector_rank, config.selector_top_k) == (256, 16)
    assert (config.rope_theta, config.rms_norm_eps, config.rotary_dim) == (1e7, 1e-6, 128)


def test_official_dflash():
    config = parse_draft_config(GEOMETRIES / "qwen3.6-35b-a3b-dflash.json")
    assert not config.dflash2
    assert (config.local_layers, config.full_layers) == ((0, 1, 2, 3, 4), (5,))
    assert config.target_layer_ids == (1, 6, 11, 16, 22, 27, 32, 37)
    assert (config.mask_token_id, config.block_size, config.sliding_window) == (248077, 16, 4096)


def test_published_config_with_flat_block_size_and_theta():
    config = parse_draft_config(GEOMETRIES / "qwen3.6-27b-dflash.json")
    assert (config.block_size, config.rope_theta) == (16, 1e7)
    assert config.causality is Causality.NON_CAUSAL


# --- export ---


@pytest.mark.parametrize(
    "values",
    [
        V1,
        v2(),
        v2(is_causal=True, nested={"output_multiplier": 0.25, "final_logit_softcapping": 20.0}),
        v1(layer_types=[F] * 4, use_sliding_window=False),
        v1(without=["num_target_layers"], max_position_embeddings=4096),
        v1(rope_parameters={"rope_theta": 5e5, "partial_rotary_factor": 0.5}),
    ],
)
def test_to_json_parses_back_equal(values):
    config = parse_draft_config(values)
    assert parse_draft_config(json.loads(json.dumps(draft_to_json(config)))) == config


def test_to_json_of_the_ablation_rule_leaves_the_key_out():
    config = parse_draft_config(V1, absent_causality=Causality.SLIDING_CAUSAL)
    values = draft_to_json(config)
    assert "is_causal" not in values
    assert parse_draft_config(values, absent_causality=Causality.SLIDING_CAUSAL) == config


@pytest.mark.parametrize("folder", ["mid_dense_v2", "draft_v1_causal", "draft_v1_full"])
def test_to_json_states_what_the_reference_package_wrote(folder):
    written = json.loads((TESTS / "fixtures" / folder / "config.json").read_text())
    ours = draft_to_json(parse_draft_config(TESTS / "fixtures" / folder))
    unused = ("transformers_version", "initializer_range", "use_cache", "is_causal")
    unused += ("bos_token_id", "eos_token_id", "pad_token_id")
    stated = {name: value for name, value in written.items() if name not in unused}
    assert {name: value for name, value in ours.items() if name != "is_causal"} == stated
    assert ours["is_causal"] is written.get("is_causal", False)
