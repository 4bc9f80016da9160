"""The embedded pair: geometry and recipe.

Reproduces `dflash_jax/pretrained/{tiny,tiny-dflash,tiny-dflash2}`: a byte-level BPE target on the
Python standard library's sources and two drafts on that target's own continuations. Two CPU
cores; the model cards beside the weights state the commands, the time they took and the figures.
"""

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.config import target as kinds
from dflash_jax.config.draft import FULL, SLIDING

PERIOD = (kinds.LINEAR,) * 3 + (kinds.FULL,)

TARGET = TargetConfig(
    vocab_size=1024,
    hidden_size=192,
    intermediate_size=384,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    rms_norm_eps=1e-6,
    layer_types=PERIOD * 2,
    tie_word_embeddings=True,
    rope_theta=1e6,
    partial_rotary_factor=0.5,
    mrope_section=(3, 3, 2),
    linear_conv_kernel_dim=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    max_position_embeddings=4096,
    eos_token_ids=(0,),
)

BLOCK = 8
WINDOW = 256


def _draft(dflash2: bool, layer_types: tuple[str, ...]) -> DraftConfig:
    extra = {}
    if dflash2:
        extra = dict(conv_kernel_size=2, conv_group_size=16, selector_rank=64, selector_top_k=16)
    return DraftConfig(
        dflash2=dflash2,
        hidden_size=TARGET.hidden_size,
        intermediate_size=384,
        num_hidden_layers=len(layer_types),
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        layer_types=layer_types,
        sliding_window=WINDOW,
        target_layer_ids=(1, 3, 5, 7),
        mask_token_id=1,
        block_size=BLOCK,
        vocab_size=TARGET.vocab_size,
        num_target_layers=TARGET.num_hidden_layers,
        max_position_embeddings=TARGET.max_position_embeddings,
        **extra,
    )


# The windows are short, so that rings wrap in ordinary use.
DFLASH = _draft(False, (SLIDING, SLIDING, FULL))
DFLASH2 = _draft(True, (SLIDING, SLIDING, SLIDING))
