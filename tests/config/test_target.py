"""Parsing of target configurations."""

import copy
import json
import pathlib

import pytest

from dflash_jax.config import ConfigError, TargetConfig, parse_target_config, target_to_json

TESTS = pathlib.Path(__file__).parents[1]
GEOMETRIES = TESTS / "geometries"
L, F = "linear_attention", "full_attention"

TEXT = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "layer_types": [L, L, L, F, L, L, L, F],
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 4096,
    "eos_token_id": None,
}
PARSED = TargetConfig(
    vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=8,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-6,
    layer_types=(L, L, L, F, L, L, L, F), tie_word_embeddings=False, rope_theta=1e7,
    partial_rotary_factor=0.25, mrope_section=(3, 3, 2), linear_conv_kernel_dim=4,
    linear_key_head_dim=16, linear_value_head_dim=32, linear_num_key_heads=2,
    linear_num_value_heads=4, max_position_embeddings=4096,
)  # fmt: skip


def text(without=(), rope=None, **fields):
    """`TEXT` with fields replaced; `rope` replaces `rope_parameters` entries (None removes)."""
    values = copy.deepcopy(TEXT) | fields
    for name, value in (rope or {}).items():
        if value is None:
            values["rope_parameters"].pop(name)
        else:
            values["rope_parameters"][name] = value
    for name in without:
        del values[name]
    return values


def wrapped(values, **outer):
    return {"model_type": "qwen3_5", "text_config": values, "vision_config": {"depth": 27}} | outer


def test_parses_the_text_model_field_by_field():
    assert parse_target_config(TEXT) == PARSED


def test_derived_sizes():
    config = parse_target_config(TEXT)
    assert config.rotary_dim == 16
    assert config.key_width == 2 * 16
    assert config.value_width == 4 * 32
    assert config.conv_channels == 32 + 32 + 128
    assert config.full_layers == (3, 7)
    assert config.linear_layers == (0, 1, 2, 4, 5, 6)
    assert hash(config) == hash(PARSED)


def test_wrapper_reads_its_text_part():
    assert parse_target_config(wrapped(TEXT)) == PARSED
    assert parse_target_config(wrapped(text(without=["model_type"]))) == PARSED


def test_wrapper_tie_word_embeddings():
    bare = text(without=["tie_word_embeddings"])
    assert parse_target_config(wrapped(bare, tie_word_embeddings=True)).tie_word_embeddings is True
    assert parse_target_config(wrapped(bare)).tie_word_embeddings is False
    with pytest.raises(ConfigError, match=r"text_config\.tie_word_embeddings is False but .*True"):
        parse_target_config(wrapped(TEXT, tie_word_embeddings=True))


def test_official_27b():
    config = parse_target_config(GEOMETRIES / "qwen3.5-27b.json")
    assert config.num_hidden_layers == 64
    assert len(config.full_layers) == 16 and len(config.linear_layers) == 48
    assert config.full_layers[:2] == (3, 7) and config.full_layers[-1] == 63
    assert (config.rotary_dim, config.rope_theta) == (64, 1e7)
    assert config.conv_channels == 2 * 16 * 128 + 48 * 128
    assert config.eos_token_ids == (248044,)


def test_mixture_of_experts_is_not_supported_yet():
    with pytest.raises(ConfigError, match=r"'qwen3_5_moe_text': mixture-of-experts .* not supp"):
        parse_target_config(text(model_type="qwen3_5_moe_text"))
    with pytest.raises(ConfigError, match="not supported yet by this version"):
        parse_target_config(GEOMETRIES / "qwen3.5-35b-a3b.json")
    with pytest.raises(ConfigError, match="not supported yet by this version"):
        parse_target_config(wrapped(text(model_type="qwen3_5_moe_text")))


def test_unknown_or_missing_model_type():
    with pytest.raises(ConfigError, match="'llama', expected 'qwen3_5_text' or 'qwen3_5'"):
        parse_target_config(text(model_type="llama"))
    with pytest.raises(ConfigError, match="missing field 'model_type'"):
        parse_target_config(text(without=["model_type"]))
    with pytest.raises(ConfigError, match="missing field 'text_config'"):
        parse_target_config({"model_type": "qwen3_5"})


# --- layer types ---


def test_layer_types_from_the_interval():
    fields = dict(without=["layer_types"])
    assert parse_target_config(text(**fields)).layer_types == PARSED.layer_types  # default 4
    three = parse_target_config(text(full_attention_interval=3, **fields))
    assert three.full_layers == (2, 5)
    assert parse_target_config(text(full_attention_interval=4)) == PARSED


def test_layer_types_and_interval_that_disagree():
    with pytest.raises(ConfigError, match=r"layer_types\[2\] is 'linear_attention' but .* = 3"):
        parse_target_config(text(full_attention_interval=3))


def test_irregular_layer_types_stand_without_an_interval():
    kinds = [F, L, L, L, L, L, L, F]
    assert parse_target_config(text(layer_types=kinds)).full_layers == (0, 7)


def test_bad_layer_types():
    with pytest.raises(ConfigError, match="has 7 entries but num_hidden_layers is 8"):
        parse_target_config(text(layer_types=[L] * 7))
    with pytest.raises(ConfigError, match=r"layer_types\[1\] is 'sliding_attention', expected"):
        parse_target_config(text(layer_types=[L, "sliding_attention", *[L] * 6]))


# --- rotary fields ---


@pytest.mark.parametrize(
    "values",
    [
        text(),
        text(rope={"rope_theta": None}, rope_theta=1e7),
        text(rope_theta=1e7),
        text(rope_theta=10_000.0),  # a stale flat value loses
        text(rope={"rope_theta": None}, rope_scaling={"rope_theta": 1e7}, rope_theta=1e4),
        text(rope_scaling={"rope_theta": 1e6, "type": "default"}),
        text(rope={"partial_rotary_factor": None}),
        text(rope={"partial_rotary_factor": None}, partial_rotary_factor=0.25),
        text(
            without=["rope_parameters"], rope_theta=1e7, partial_rotary_factor=0.25,
            mrope_section=[3, 3, 2],
        ),
    ],
)  # fmt: skip
def test_spellings_of_the_same_rotary_fields(values):
    assert parse_target_config(values) == PARSED


def test_no_theta_anywhere_is_an_error_that_names_the_places():
    with pytest.raises(ConfigError) as error:
        parse_target_config(text(rope={"rope_theta": None}))
    for place in ("rope_parameters.rope_theta", "rope_scaling.rope_theta", "config: rope_theta"):
        assert place in str(error.value)


@pytest.mark.parametrize("section", [[3, 3, 3], [8], [4, 4, 0, 0], [9, -1, 0]])
def test_mrope_section_must_sum_to_the_frequencies(section):
    with pytest.raises(ConfigError, match=r"mrope_section is .* sum 8 = head_dim 64"):
        parse_target_config(text(rope={"mrope_section": section}))


def test_mrope_section_default_fits_the_published_head_only():
    published = text(head_dim=256, rope={"mrope_section": None})
    assert parse_target_config(published).mrope_section == (11, 11, 10)
    with pytest.raises(ConfigError, match=r"\[11, 11, 10\], expected .* sum 8"):
        parse_target_config(text(rope={"mrope_section": None}))


def test_partial_rotary_factor_must_give_an_even_width():
    for factor in (0.01, 1.5, 5 / 64):
        with pytest.raises(ConfigError, match="expected an even number in 2..64"):
            parse_target_config(text(rope={"partial_rotary_factor": factor}))


# --- unsupported and malformed ---


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (text(attention_bias=True), "attention_bias is True"),
        (text(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (text(attn_output_gate=False), "attn_output_gate is False"),
        (text(rope={"rope_type": "yarn"}), r"rope_parameters\.rope_type is 'yarn'"),
        (text(rope_scaling={"type": "linear"}), r"rope_scaling\.type is 'linear'"),
        (text(rope={"mrope_interleaved": False}), "mrope_interleaved is False"),
        (text(rope={F: {"rope_theta": 1e7}}), "per layer type"),
        (text(quantization_config={"bits": 8}), "quantized weights are not supported"),
        (text(num_key_value_heads=3), "num_attention_heads is 4, not a multiple of .* 3"),
        (text(linear_num_key_heads=3), "linear_num_value_heads is 4, not a multiple of .* 3"),
        (text(hidden_size=0), "hidden_size is 0, expected a positive integer"),
        (text(hidden_size="64"), "hidden_size is '64', expected a positive integer"),
        (text(rms_norm_eps=0.0), "rms_norm_eps is 0.0"),
    ],
)
def test_refuses(values, message):
    with pytest.raises(ConfigError, match=message):
        parse_target_config(values)


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
        "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
        "linear_num_key_heads", "linear_num_value_heads", "max_position_embeddings",
    ],
)  # fmt: skip
def test_every_size_is_required(name):
    with pytest.raises(ConfigError, match=f"missing field '{name}'; looked for it at 'config: "):
        parse_target_config(text(without=[name]))


# --- end of sequence ---


def eos(tmp_path, config_eos, generation=None):
    (tmp_path / "config.json").write_text(json.dumps(text(eos_token_id=config_eos)))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return parse_target_config(tmp_path).eos_token_ids


def test_eos_from_the_config(tmp_path):
    assert eos(tmp_path, None) == ()
    assert eos(tmp_path, 7) == (7,)
    assert eos(tmp_path, [9, 7, 9]) == (9, 7)
    assert eos(tmp_path, 7, {"eos_token_id": None}) == (7,)


def test_generation_config_takes_precedence(tmp_path):
    assert eos(tmp_path, 7, {"eos_token_id": [3, 7]}) == (3, 7)
    assert eos(tmp_path, 7, {"eos_token_id": 4}) == (4,)
    assert eos(tmp_path, None, {"eos_token_id": 5}) == (5,)


def test_eos_of_a_wrapper():
    assert parse_target_config(wrapped(text(eos_token_id=6))).eos_token_ids == (6,)
    assert parse_target_config(wrapped(TEXT, eos_token_id=[1, 2])).eos_token_ids == (1, 2)


@pytest.mark.parametrize("bad", [-1, [1, -1], "</s>", [1.0], True])
def test_bad_eos(bad):
    with pytest.raises(ConfigError, match="eos_token_id is .* expected a token id"):
        parse_target_config(text(eos_token_id=bad))


# --- export ---


@pytest.mark.parametrize("eos_ids", [None, 7, [9, 7]])
@pytest.mark.parametrize("tied", [False, True])
def test_to_json_parses_back_equal(eos_ids, tied):
    config = parse_target_config(text(eos_token_id=eos_ids, tie_word_embeddings=tied))
    values = json.loads(json.dumps(target_to_json(config, "bfloat16")))
    assert parse_target_config(values) == config
    assert values["architectures"] == ["Qwen3_5ForCausalLM"]
    assert values["dtype"] == "bfloat16"
    assert values["rope_parameters"]["mrope_interleaved"] is True


def test_to_json_states_what_the_reference_package_wrote():
    fixture = TESTS / "fixtures" / "dense_text"
    written = json.loads((fixture / "config.json").read_text())
    ours = target_to_json(parse_target_config(fixture))
    for name in ("transformers_version", "initializer_range"):
        written.pop(name)
    assert ours == written
