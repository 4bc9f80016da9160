"""Which tensors a checkpoint holds: Hugging Face name <-> place in the tree, with its shape.

The tables are the whole mapping: names are split at dots, `layers.3` becomes `layers_3`, and
weights keep the checkpoint's [out, in] layout, so nothing is transposed on the way.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from dflash_jax.config import DraftConfig, TargetConfig

Config = TargetConfig | DraftConfig


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint.

    name:         spelling in the file we write.
    shape:        expected shape.
    aliases:      other spellings that load to the same place.
    path:         keys in the params tree.
    keep_float32: stays float32 whatever dtype the weights are loaded in.
    """

    name: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(re.sub(r"\blayers\.(\d+)", r"layers_\1", self.name).split("."))

    @property
    def keep_float32(self) -> bool:
        # The decay is exp(-exp(A_log) ...): in bf16 its error grows with the context.
        return self.name.endswith((".A_log", ".dt_bias"))

    @property
    def size(self) -> int:
        return math.prod(self.shape)


# --- tables: name -> shape in named sizes, which the functions below take from the config ---

_TARGET = {
    "model.embed_tokens.weight": "vocab hidden",
    "model.norm.weight": "hidden",
}
_TARGET_HEAD = {"lm_head.weight": "vocab hidden"}  # absent when tied
_TARGET_LAYER = {
    "input_layernorm.weight": "hidden",
    "post_attention_layernorm.weight": "hidden",
    "mlp.gate_proj.weight": "intermediate hidden",
    "mlp.up_proj.weight": "intermediate hidden",
    "mlp.down_proj.weight": "hidden intermediate",
}
_TARGET_FULL_LAYER = {
    "self_attn.q_proj.weight": "query_and_gate hidden",
    "self_attn.k_proj.weight": "key hidden",
    "self_attn.v_proj.weight": "key hidden",
    "self_attn.o_proj.weight": "hidden query",
    "self_attn.q_norm.weight": "head",
    "self_attn.k_norm.weight": "head",
}
_TARGET_LINEAR_LAYER = {
    "linear_attn.in_proj_qkv.weight": "conv_channels hidden",
    "linear_attn.in_proj_z.weight": "gdn_value hidden",
    "linear_attn.in_proj_b.weight": "gdn_heads hidden",
    "linear_attn.in_proj_a.weight": "gdn_heads hidden",
    "linear_attn.conv1d.weight": "conv_channels one conv_taps",
    "linear_attn.A_log": "gdn_heads",
    "linear_attn.dt_bias": "gdn_heads",
    "linear_attn.norm.weight": "gdn_head",
    "linear_attn.out_proj.weight": "hidden gdn_value",
}
_DRAFT = {
    "fc.weight": "hidden features",
    "hidden_norm.weight": "hidden",
    "norm.weight": "hidden",
}
_DRAFT_LAYER = {
    **_TARGET_LAYER,
    **_TARGET_FULL_LAYER,
    "self_attn.q_proj.weight": "query hidden",  # the draft has no attention gate
}
_DFLASH2 = {
    "candidate_selector.hidden_projection.weight": "rank hidden",
    "candidate_selector.predecessor_codebook": "vocab rank",
    "candidate_selector.successor_codebook": "vocab rank",
}
_DFLASH2_LAYER = {
    "attention_conv.base_kernel": "sides taps hidden",
    "attention_conv.kernel_projection.weight": "kernel_rows hidden",
    "mlp_conv.base_kernel": "sides taps hidden",
    "mlp_conv.kernel_projection.weight": "kernel_rows hidden",
}
# Files that name the codebooks like modules; the official ones use the bare name.
_ALIASES = {
    name: (f"{name}.weight",) for name in _DFLASH2 if name.endswith("_codebook")
}  # fmt: skip


def tensor_table(config: Config) -> tuple[TensorSpec, ...]:
    """Every tensor a checkpoint of this geometry must hold, and no other."""
    return _target_table(config) if isinstance(config, TargetConfig) else _draft_table(config)


def _target_table(config: TargetConfig) -> tuple[TensorSpec, ...]:
    sizes = {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "query": config.num_attention_heads * config.head_dim,
        "query_and_gate": config.num_attention_heads * config.head_dim * 2,
        "key": config.num_key_value_heads * config.head_dim,
        "head": config.head_dim,
        "conv_channels": config.conv_channels,
        "conv_taps": config.linear_conv_kernel_dim,
        "gdn_value": config.value_width,
        "gdn_heads": config.linear_num_value_heads,
        "gdn_head": config.linear_value_head_dim,
        "one": 1,
    }
    specs = _specs("", _TARGET, sizes)
    full = set(config.full_layers)
    for layer in range(config.num_hidden_layers):
        mixer = _TARGET_FULL_LAYER if layer in full else _TARGET_LINEAR_LAYER
        specs += _specs(f"model.layers.{layer}.", _TARGET_LAYER | mixer, sizes)
    if not config.tie_word_embeddings:
        specs += _specs("", _TARGET_HEAD, sizes)
    return tuple(specs)


def _draft_table(config: DraftConfig) -> tuple[TensorSpec, ...]:
    sizes = {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "query": config.num_attention_heads * config.head_dim,
        "key": config.num_key_value_heads * config.head_dim,
        "head": config.head_dim,
        "features": config.hidden_size * len(config.target_layer_ids),
    }
    tensors, layer_tensors = _DRAFT, _DRAFT_LAYER
    if config.dflash2:
        tensors, layer_tensors = tensors | _DFLASH2, layer_tensors | _DFLASH2_LAYER
        sizes |= {
            "rank": config.selector_rank,
            "sides": 2,
            "taps": config.conv_kernel_size,
            "kernel_rows": 2 * config.conv_kernel_size * config.conv_groups,
        }
    specs = _specs("", tensors, sizes)
    for layer in range(config.num_hidden_layers):
        specs += _specs(f"layers.{layer}.", layer_tensors, sizes)
    return tuple(specs)


def _specs(prefix: str, table: Mapping[str, str], sizes: Mapping[str, int]) -> list[TensorSpec]:
    return [
        TensorSpec(
            prefix + name, tuple(sizes[size] for size in shape.split()), _ALIASES.get(name, ())
        )
        for name, shape in table.items()
    ]


# --- names in files ---

_SKIPPED_PREFIXES = ("mtp.", "model.visual.")  # multi-token prediction head, vision tower
_MULTIMODAL_PREFIX = "model.language_model."


@dataclasses.dataclass(frozen=True)
class Matched:
    """How the names in the files meet a table.

    found:   spec -> every name that spells it (more than one: they must hold the same values).
    skipped: names of parts that this package does not use.
    missing: specs that no name spells.
    extra:   names that are neither in the table nor of a skipped part.
    """

    found: Mapping[TensorSpec, tuple[str, ...]]
    skipped: tuple[str, ...]
    missing: tuple[TensorSpec, ...]
    extra: tuple[str, ...]


def match_names(config: Config, names: Sequence[str]) -> Matched:
    """Assigns names of a checkpoint to the tensors of this geometry.

    A target's text tensors may carry the multimodal prefix (`model.language_model.`). A
    head in a tied checkpoint counts as one more spelling of the embedding.
    """
    is_target = isinstance(config, TargetConfig)
    table = tensor_table(config)
    by_spelling = {spelling: spec for spec in table for spelling in (spec.name, *spec.aliases)}
    if is_target and config.tie_word_embeddings:
        by_spelling["lm_head.weight"] = by_spelling["model.embed_tokens.weight"]
    found: dict[TensorSpec, tuple[str, ...]] = {}
    skipped, extra = [], []
    for name in sorted(names):
        spelling = name
        if is_target and name.startswith(_MULTIMODAL_PREFIX):
            spelling = "model." + name.removeprefix(_MULTIMODAL_PREFIX)
        if spelling in by_spelling:
            spec = by_spelling[spelling]
            found[spec] = (*found.get(spec, ()), name)
        elif is_target and name.startswith(_SKIPPED_PREFIXES):
            skipped.append(name)
        else:
            extra.append(name)
    missing = tuple(spec for spec in table if spec not in found)
    return Matched(found, tuple(skipped), missing, tuple(extra))
