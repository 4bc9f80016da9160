"""DFlash and DFlash2: block-drafted speculative decoding for Qwen3.5 targets, in JAX."""

from dflash_jax.config import Causality, ConfigError
from dflash_jax.decoding.distribution import Sampling
from dflash_jax.decoding.generate import generate
from dflash_jax.decoding.result import Generation, Origin, Round
from dflash_jax.io.pair import Pair, load_pair
from dflash_jax.sessions.checkpoint import Checkpoint
from dflash_jax.sessions.contexts import ContextBudget
from dflash_jax.sessions.engine import Engine
from dflash_jax.sessions.request import Request

__all__ = [
    "Causality",
    "Checkpoint",
    "ConfigError",
    "ContextBudget",
    "Engine",
    "Generation",
    "Origin",
    "Pair",
    "Request",
    "Round",
    "Sampling",
    "generate",
    "load_pair",
]
