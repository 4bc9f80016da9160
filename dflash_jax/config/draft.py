"""Configuration of a draft: DFlash (`DFlashDraftModel`) or DFlash2 (`DFlash2DraftModel`)."""

import dataclasses
import enum
from typing import Any

from absl import logging

from dflash_jax.config import reading
from dflash_jax.config.reading import ConfigError, ConfigSource, Section
from dflash_jax.config.rope import parse_rope

SLIDING = "sliding_attention"
FULL = "full_attention"

_ARCHITECTURES = {"DFlashDraftModel": False, "DFlash2DraftModel": True}
_DFLASH2_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_DEFAULT_BLOCK_SIZE = 16  # what the official package takes
_DEFAULT_MAX_WINDOW_LAYERS = 28  # class default of the Hugging Face Qwen3 config


class Causality(enum.Enum):
    """Which block columns a block column may attend to.

    NON_CAUSAL:     every layer sees the whole block (the specification).
    CAUSAL:         every layer sees columns up to itself, window `0 <= q - k < S`.
    SLIDING_CAUSAL: sliding layers causal, full layers not: what one public reference does
                    when `is_causal` is absent. A choice for ablations, never a default.
    """

    NON_CAUSAL = "non_causal"
    CAUSAL = "causal"
    SLIDING_CAUSAL = "sliding_causal"


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """Geometry of a draft; hashable, so usable as a jit static.

    `dflash2` says which of the two models this is: with it come the dynamic convolution
    (`conv_*`) and the candidate selector (`selector_*`), which are None for DFlash.
    `target_layer_ids` are zero-based target block ids, in recorded order.
    `block_size` is the trained block width (1 anchor + masks); the draft count at run time
    is a free choice. `sliding_window` is None when no layer is sliding.
    """

    dflash2: bool
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    layer_types: tuple[str, ...]
    sliding_window: int | None
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    vocab_size: int
    num_target_layers: int | None = None
    partial_rotary_factor: float = 1.0
    causality: Causality = Causality.NON_CAUSAL
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    max_position_embeddings: int | None = None  # carried for export only; nothing here reads it

    @property
    def name(self) -> str:
        return "DFlash2" if self.dflash2 else "DFlash"

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def conv_groups(self) -> int:
        return self.hidden_size // self.conv_group_size

    @property
    def local_layers(self) -> tuple[int, ...]:
        """Layer ids with a ring; index in this tuple = ring layer."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == SLIDING)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layer ids with paged KV; index in this tuple = KV layer."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)

    def layer_is_causal(self, layer: int) -> bool:
        """Whether block columns of `layer` see only columns up to themselves."""
        if self.causality is Causality.SLIDING_CAUSAL:
            return self.layer_types[layer] == SLIDING
        return self.causality is Causality.CAUSAL


def parse_draft_config(
    source: ConfigSource, *, absent_causality: Causality = Causality.NON_CAUSAL
) -> DraftConfig:
    """Parses the configuration of a DFlash or DFlash2 draft.

    Fields of the draft itself may stand in `dflash_config` or at the top level; both with
    different values is an error.

    Args:
      source: a parsed `config.json`, its path, or the directory of a checkpoint.
      absent_causality: the rule when the config has no `is_causal`; a stated one wins.

    Raises:
      ConfigError: names the field, the value, what was expected and where it came from.
    """
    top = reading.open_section(source)
    nested = top.section("dflash_config")
    either = (nested, top)
    dflash2 = _is_dflash2(top, either)
    _check_supported(top, either)

    def size(name: str) -> int:
        return reading.read(reading.SIZE, name, top)

    head_dim, hidden_size = size("head_dim"), size("hidden_size")
    num_heads, num_kv_heads = size("num_attention_heads"), size("num_key_value_heads")
    reading.require_multiple(
        num_heads, num_kv_heads, top.place("num_attention_heads"), "num_key_value_heads"
    )
    rope = parse_rope(top, head_dim, default_factor=1.0)
    layer_types = _layer_types(top, size("num_hidden_layers"))
    is_causal = reading.read(reading.BOOL, "is_causal", *either, default=None)
    return DraftConfig(
        dflash2=dflash2,
        hidden_size=hidden_size,
        intermediate_size=size("intermediate_size"),
        num_hidden_layers=len(layer_types),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=reading.read(reading.POSITIVE, "rms_norm_eps", top),
        rope_theta=rope.theta,
        layer_types=layer_types,
        sliding_window=size("sliding_window") if SLIDING in layer_types else None,
        target_layer_ids=_target_layer_ids(either),
        mask_token_id=reading.read(reading.TOKEN, "mask_token_id", *either),
        block_size=_block_size(either),
        vocab_size=size("vocab_size"),
        num_target_layers=reading.read(reading.SIZE, "num_target_layers", *either, default=None),
        partial_rotary_factor=rope.partial_rotary_factor,
        causality=absent_causality if is_causal is None else _causality(is_causal),
        **(_dflash2_fields(either, hidden_size) if dflash2 else {}),
        input_embedding_scale=reading.read(
            reading.NUMBER, "input_embedding_scale", *either, default=1.0
        ),
        output_multiplier=reading.read(reading.NUMBER, "output_multiplier", *either, default=1.0),
        final_logit_softcapping=_softcapping(either),
        max_position_embeddings=reading.read(
            reading.SIZE, "max_position_embeddings", top, default=None
        ),
    )


def _causality(is_causal: bool) -> Causality:
    return Causality.CAUSAL if is_causal else Causality.NON_CAUSAL


def _is_dflash2(top: Section, either: tuple[Section, ...]) -> bool:
    """Which model the architecture names; its fields must tell the same story."""
    names = reading.read(reading.TEXTS, "architectures", top)
    known = ", ".join(_ARCHITECTURES)
    if len(names) != 1 or names[0] not in _ARCHITECTURES:
        raise ConfigError(
            f"{top.place('architectures')} is {list(names)}, expected one of the known: {known}"
        )
    dflash2 = _ARCHITECTURES[names[0]]
    for field in _DFLASH2_FIELDS:
        holders = [section for section in either if section.has(field)]
        if holders and not dflash2:
            raise ConfigError(
                f"{holders[0].place(field)} is a DFlash2 field, but "
                f"{top.place('architectures')} is {names[0]!r}"
            )
        if not holders and dflash2:
            places = ", ".join(f"'{section.place(field)}'" for section in either)
            raise ConfigError(
                f"missing field '{field}', which {names[0]!r} needs; looked for it at {places}"
            )
    model_type = reading.read(reading.TEXT, "model_type", top, default="qwen3")
    if model_type != "qwen3":
        logging.warning(
            "%s is %r, not 'qwen3'; read as %s all the same",
            top.place("model_type"), model_type, names[0],
        )  # fmt: skip
    return dflash2


def _check_supported(top: Section, either: tuple[Section, ...]) -> None:
    reading.require("attention_bias", False, top, "projections with bias are not supported")
    reading.require("hidden_act", "silu", top, "other activations are not supported")
    for section in either:
        reading.require(
            "sample_from_anchor", False, section, "sampling from the anchor is not supported"
        )
        if section.has("draft_vocab_size"):
            raise ConfigError(
                f"{section.place('draft_vocab_size')} is {section.values['draft_vocab_size']!r}: "
                "a draft with its own reduced head is not supported"
            )
    if top.has("quantization_config"):
        raise ConfigError(
            f"{top.place('quantization_config')} is present; quantized weights are not supported"
        )


def _layer_types(top: Section, layers: int) -> tuple[str, ...]:
    """`layer_types`; absent, what the Hugging Face Qwen3 config derives from the window."""
    stated = reading.read_layer_types(top, layers, (SLIDING, FULL))
    use_window = reading.read(reading.BOOL, "use_sliding_window", top, default=None)
    if stated is None:
        if not use_window or not top.has("sliding_window"):
            return (FULL,) * layers
        first = reading.read(
            reading.INT, "max_window_layers", top, default=_DEFAULT_MAX_WINDOW_LAYERS
        )
        return tuple(SLIDING if i >= first else FULL for i in range(layers))
    if SLIDING in stated and use_window is False:
        raise ConfigError(
            f"conflict: {top.place('layer_types')} has {SLIDING!r} layers but "
            f"{top.place('use_sliding_window')} is false"
        )
    return stated


def _target_layer_ids(either: tuple[Section, ...]) -> tuple[int, ...]:
    """Block ids in recorded order; `check_pair` holds them against the target."""
    ids = reading.read(reading.INTS, "target_layer_ids", *either)
    if not ids:
        place = next(section for section in either if section.has("target_layer_ids"))
        raise ConfigError(f"{place.place('target_layer_ids')} is empty")
    return ids


def _block_size(either: tuple[Section, ...]) -> int:
    size = reading.read(reading.SIZE, "block_size", *either, default=None)
    if size is None:
        logging.info(
            "block_size is neither at '%s' nor at '%s'; taking %d, the official default",
            *(section.place("block_size") for section in either), _DEFAULT_BLOCK_SIZE,
        )  # fmt: skip
        return _DEFAULT_BLOCK_SIZE
    if size < 2:
        raise ConfigError(f"block_size is {size}, expected at least 2 (an anchor and one mask)")
    return size


def _softcapping(either: tuple[Section, ...]) -> float | None:
    cap = reading.read(reading.NUMBER, "final_logit_softcapping", *either, default=0.0)
    if cap < 0:
        raise ConfigError(f"final_logit_softcapping is {cap:g}, expected a positive number or none")
    return cap or None


def _dflash2_fields(either: tuple[Section, ...], hidden_size: int) -> dict[str, int]:
    fields = {name: reading.read(reading.SIZE, name, *either) for name in _DFLASH2_FIELDS}
    reading.require_multiple(
        hidden_size, fields["conv_group_size"], "hidden_size", "conv_group_size"
    )
    return fields


def draft_to_json(config: DraftConfig, dtype: str = "float32") -> dict[str, Any]:
    """The `config.json` of a draft, laid out like the official ones.

    Parses back to an equal object. `Causality.SLIDING_CAUSAL` has no spelling in the
    format: the key `is_causal` is left out, and the reader must be told the rule
    (`parse_draft_config(..., absent_causality=Causality.SLIDING_CAUSAL)`).

    Args:
      config: the geometry.
      dtype: of the stored weights, as Hugging Face names it ("float32", "bfloat16").
    """
    nested: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    if config.dflash2:
        nested |= {name: getattr(config, name) for name in _DFLASH2_FIELDS}
    for name, neutral in (
        ("input_embedding_scale", 1.0),
        ("output_multiplier", 1.0),
        ("final_logit_softcapping", None),
    ):
        if getattr(config, name) != neutral:
            nested[name] = getattr(config, name)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.partial_rotary_factor != 1.0:
        rope["partial_rotary_factor"] = config.partial_rotary_factor
    values: dict[str, Any] = {
        "architectures": [name for name, is_2 in _ARCHITECTURES.items() if is_2 == config.dflash2],
        "model_type": "qwen3",
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
        "rope_parameters": rope,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "max_window_layers": 0,
        "tie_word_embeddings": False,
        "dflash_config": nested,
    }
    if config.causality is not Causality.SLIDING_CAUSAL:
        values["is_causal"] = config.causality is Causality.CAUSAL
    for name in ("num_target_layers", "max_position_embeddings"):
        if getattr(config, name) is not None:
            values[name] = getattr(config, name)
    return values
