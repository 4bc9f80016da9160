"""A tiny target and drafts for it, randomised so that every part of them matters."""

import jax
import numpy as np
import pytest

from dflash_jax.config import Causality, DraftConfig, TargetConfig
from dflash_jax.config import target as kinds
from dflash_jax.config.draft import FULL, SLIDING
from dflash_jax.training import draft, target

TARGET = TargetConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    rms_norm_eps=1e-6,
    layer_types=(kinds.LINEAR, kinds.FULL),
    tie_word_embeddings=True,
    rope_theta=1e4,
    partial_rotary_factor=0.5,
    mrope_section=(2, 1, 1),
    linear_conv_kernel_dim=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    max_position_embeddings=512,
    eos_token_ids=(0,),
)


def _randomised(params, seed: int, scale: float):
    """Adds noise to every leaf: norms, gates and codebooks too, which start at 0 or 1."""
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: np.asarray(leaf) + scale * random.normal(size=leaf.shape).astype(np.float32),
        params,
    )


@pytest.fixture(scope="session")
def target_config() -> TargetConfig:
    return TARGET


@pytest.fixture(scope="session")
def target_params():
    return _randomised(target.init_params(TARGET, 0), 1, 0.3)


@pytest.fixture(scope="session")
def draft_config():
    """`(dflash2, ...) -> DraftConfig` for the tiny target."""

    def make(
        dflash2: bool,
        layer_types: tuple[str, ...] = (SLIDING, FULL),
        causality: Causality = Causality.NON_CAUSAL,
        window: int = 4,
    ) -> DraftConfig:
        extra = {}
        if dflash2:
            extra = dict(conv_kernel_size=2, conv_group_size=8, selector_rank=6, selector_top_k=4)
        return DraftConfig(
            dflash2=dflash2,
            hidden_size=TARGET.hidden_size,
            intermediate_size=48,
            num_hidden_layers=len(layer_types),
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            rms_norm_eps=1e-6,
            rope_theta=1e4,
            layer_types=layer_types,
            sliding_window=window if SLIDING in layer_types else None,
            target_layer_ids=(1, 0),
            mask_token_id=1,
            block_size=4,
            vocab_size=TARGET.vocab_size,
            num_target_layers=TARGET.num_hidden_layers,
            causality=causality,
            **extra,
        )

    return make


@pytest.fixture(scope="session")
def random_draft():
    """`(config, seed) -> params` in which nothing is at its start value."""
    return lambda config, seed=0: _randomised(draft.init_params(config, seed), seed + 10, 0.2)
