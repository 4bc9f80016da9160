"""The embedded pair: geometry and recipe.

Reproduces `dflash_jax/pretrained/{tiny,tiny-dflash,tiny-dflash2}`: a byte-level BPE target on the
Python standard library's sources and two drafts on that target's own continuations. Two CPU
cores; the model cards beside the weights state the commands, the time they took and the figures.
"""

from dflash_jax.config import TargetConfig
from dflash_jax.config import target as kinds

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
