"""Configuration of the target: Qwen3.5 dense text (`model_type` `qwen3_5_text`)."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from dflash_jax.config import reading
from dflash_jax.config.reading import ConfigError, ConfigSource, Section
from dflash_jax.config.rope import parse_rope

LINEAR = "linear_attention"
FULL = "full_attention"

_TEXT = "qwen3_5_text"
_WRAPPER = "qwen3_5"
_MOE = ("qwen3_5_moe", "qwen3_5_moe_text")
_DEFAULT_INTERVAL = 4
_DEFAULT_ROTARY_FACTOR = 0.25
_DEFAULT_MROPE_SECTION = (11, 11, 10)


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """Geometry of a Qwen3.5 dense text model; hashable, so usable as a jit static.

    Field names are those of the Hugging Face `config.json`. Sizes are in elements.
    `mrope_section` counts rotary frequencies per position axis (t, h, w); its sum is
    `rotary_dim / 2`. `eos_token_ids` may be empty.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    layer_types: tuple[str, ...]
    tie_word_embeddings: bool
    rope_theta: float
    partial_rotary_factor: float
    mrope_section: tuple[int, int, int]
    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def conv_channels(self) -> int:
        """C: channels of the GDN convolution, rows [q | k | v]."""
        return 2 * self.key_width + self.value_width

    @property
    def key_width(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_width(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Block ids with full attention, in order; index in this tuple = KV layer."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Block ids with Gated DeltaNet; index in this tuple = GDN layer."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR)


def parse_target_config(source: ConfigSource) -> TargetConfig:
    """Parses the configuration of a Qwen3.5 dense target.

    Accepts the text model (`qwen3_5_text`) and the multimodal wrapper (`qwen3_5`, whose
    text part is `text_config`; the vision part is not read).

    Args:
      source: a parsed `config.json`, its path, or the directory of a checkpoint. Of a
        directory `generation_config.json` is read too: EOS ids there take precedence, as
        in Hugging Face generation.

    Raises:
      ConfigError: names the field, the value, what was expected and where it came from.
    """
    outer = reading.open_section(source)
    text, places = _text_section(outer)
    _check_supported(text)

    def size(name: str) -> int:
        return reading.read(reading.SIZE, name, text)

    head_dim = size("head_dim")
    rope = parse_rope(text, head_dim, default_factor=_DEFAULT_ROTARY_FACTOR)
    config = TargetConfig(
        vocab_size=size("vocab_size"),
        hidden_size=size("hidden_size"),
        intermediate_size=size("intermediate_size"),
        num_hidden_layers=size("num_hidden_layers"),
        num_attention_heads=size("num_attention_heads"),
        num_key_value_heads=size("num_key_value_heads"),
        head_dim=head_dim,
        rms_norm_eps=reading.read(reading.POSITIVE, "rms_norm_eps", text),
        layer_types=_layer_types(text, size("num_hidden_layers")),
        # The class default; a checkpoint that has no head then misses `lm_head.weight`.
        tie_word_embeddings=reading.read(
            reading.BOOL, "tie_word_embeddings", *places, default=False
        ),
        rope_theta=rope.theta,
        partial_rotary_factor=rope.partial_rotary_factor,
        mrope_section=_mrope_section(rope.parameters, text, head_dim, rope.partial_rotary_factor),
        linear_conv_kernel_dim=size("linear_conv_kernel_dim"),
        linear_key_head_dim=size("linear_key_head_dim"),
        linear_value_head_dim=size("linear_value_head_dim"),
        linear_num_key_heads=size("linear_num_key_heads"),
        linear_num_value_heads=size("linear_num_value_heads"),
        max_position_embeddings=size("max_position_embeddings"),
        eos_token_ids=_eos_token_ids(source, places),
    )
    for value, of in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        reading.require_multiple(getattr(config, value), getattr(config, of), text.place(value), of)
    return config


def _text_section(outer: Section) -> tuple[Section, tuple[Section, ...]]:
    """The text part, and the places where fields of the whole model may stand."""
    model_type = reading.read(reading.TEXT, "model_type", outer)
    if model_type == _WRAPPER:
        text = outer.section("text_config")
        if not text.values:
            raise ConfigError(
                f"missing field 'text_config'; looked for it at '{outer.place('text_config')}'"
            )
        inner_type = reading.read(reading.TEXT, "model_type", text, default=_TEXT)
        places: tuple[Section, ...] = (text, outer)
    else:
        text, inner_type, places = outer, model_type, (outer,)
    if inner_type in _MOE:
        raise ConfigError(
            f"{text.place('model_type')} is {inner_type!r}: mixture-of-experts targets are not "
            f"supported yet by this version (supported: {_TEXT!r}, {_WRAPPER!r})"
        )
    if inner_type != _TEXT:
        raise ConfigError(
            f"{text.place('model_type')} is {inner_type!r}, expected {_TEXT!r} or {_WRAPPER!r}"
        )
    if outer.has("quantization_config") or text.has("quantization_config"):
        raise ConfigError(
            f"{outer.source}: quantization_config is present; quantized weights are not supported"
        )
    return text, places


def _check_supported(text: Section) -> None:
    reading.require("attention_bias", False, text, "projections with bias are not supported")
    reading.require("hidden_act", "silu", text, "other activations are not supported")
    reading.require("attn_output_gate", True, text, "attention without its gate is not supported")
    rope = text.section("rope_parameters")
    reading.require("mrope_interleaved", True, rope, "sectioned MRoPE is not supported")


def _layer_types(text: Section, layers: int) -> tuple[str, ...]:
    """`layer_types`, or what `full_attention_interval` says; both must agree."""
    stated = reading.read_layer_types(text, layers, (LINEAR, FULL))
    interval = reading.read(reading.SIZE, "full_attention_interval", text, default=None)
    if stated is not None and interval is None:
        return stated
    every = interval or _DEFAULT_INTERVAL
    derived = tuple(LINEAR if (i + 1) % every else FULL for i in range(layers))
    if stated is not None and stated != derived:
        first = next(i for i in range(layers) if stated[i] != derived[i])
        raise ConfigError(
            f"conflict: {text.place('layer_types')}[{first}] is {stated[first]!r} but "
            f"{text.place('full_attention_interval')} = {every} makes layer {first} "
            f"{derived[first]!r}"
        )
    return derived


def _mrope_section(
    rope: Section, text: Section, head_dim: int, factor: float
) -> tuple[int, int, int]:
    section = reading.read(
        reading.INTS, "mrope_section", rope, text, default=_DEFAULT_MROPE_SECTION
    )
    frequencies = int(head_dim * factor) // 2
    if len(section) != 3 or min(section) < 0 or sum(section) != frequencies:
        raise ConfigError(
            f"{rope.place('mrope_section')} is {list(section)}, expected three counts (t, h, w) "
            f"with sum {frequencies} = head_dim {head_dim} * partial_rotary_factor {factor:g} / 2"
        )
    return section


def _eos_token_ids(source: ConfigSource, places: tuple[Section, ...]) -> tuple[int, ...]:
    """EOS ids, in order and without repeats: `generation_config.json`, else `config.json`."""
    sections = places
    if not isinstance(source, Mapping):
        path = pathlib.Path(source) / "generation_config.json"
        if path.is_file():
            sections = (Section(reading.read_json(path), str(path)), *places)
    ids = reading.read(reading.TOKENS, "eos_token_id", *sections, default=(), first_wins=True)
    return tuple(dict.fromkeys(ids))


def target_to_json(config: TargetConfig, dtype: str = "float32") -> dict[str, Any]:
    """The `config.json` of a target in Hugging Face form; parses back to an equal object.

    Args:
      config: the geometry.
      dtype: of the stored weights, as Hugging Face names it ("float32", "bfloat16").
    """
    eos = config.eos_token_ids
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": _TEXT,
        "dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": config.rms_norm_eps,
        "layer_types": list(config.layer_types),
        "tie_word_embeddings": config.tie_word_embeddings,
        # In both places, as Hugging Face writes it.
        "partial_rotary_factor": config.partial_rotary_factor,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": config.partial_rotary_factor,
            "mrope_section": list(config.mrope_section),
            "mrope_interleaved": True,
        },
        "linear_conv_kernel_dim": config.linear_conv_kernel_dim,
        "linear_key_head_dim": config.linear_key_head_dim,
        "linear_value_head_dim": config.linear_value_head_dim,
        "linear_num_key_heads": config.linear_num_key_heads,
        "linear_num_value_heads": config.linear_num_value_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "eos_token_id": list(eos) if len(eos) > 1 else (eos[0] if eos else None),
        "bos_token_id": None,
        "pad_token_id": None,
        "use_cache": True,
    }
