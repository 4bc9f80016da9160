"""Configurations of target and draft, parsed from Hugging Face `config.json`."""

from dflash_jax.config.draft import Causality, DraftConfig, draft_to_json, parse_draft_config
from dflash_jax.config.pair import check_pair
from dflash_jax.config.reading import ConfigError
from dflash_jax.config.target import TargetConfig, parse_target_config, target_to_json

__all__ = [
    "Causality",
    "ConfigError",
    "DraftConfig",
    "TargetConfig",
    "check_pair",
    "draft_to_json",
    "parse_draft_config",
    "parse_target_config",
    "target_to_json",
]
