"""Geometry of the largest official dense pair, for measurements with random weights.

Qwen3.5-27B's text model and Qwen3.8-27B-DFlash2, as their `config.json` say; a test compares both
with copies of those files. In bfloat16 the weights take 54 GB and 4 GB of device memory.
"""

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.config import target as kinds
from dflash_jax.config.draft import SLIDING

TARGET = TargetConfig(
    vocab_size=248320,
    hidden_size=5120,
    intermediate_size=17408,
    num_hidden_layers=64,
    num_attention_heads=24,
    num_key_value_heads=4,
    head_dim=256,
    rms_norm_eps=1e-6,
    layer_types=((kinds.LINEAR,) * 3 + (kinds.FULL,)) * 16,
    tie_word_embeddings=False,
    rope_theta=1e7,
    partial_rotary_factor=0.25,
    mrope_section=(11, 11, 10),
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=48,
    max_position_embeddings=262144,
    eos_token_ids=(248044,),
)

DFLASH2 = DraftConfig(
    dflash2=True,
    hidden_size=5120,
    intermediate_size=17408,
    num_hidden_layers=5,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1e7,
    layer_types=(SLIDING,) * 5,
    sliding_window=2048,
    target_layer_ids=(5, 19, 33, 47, 61),
    mask_token_id=248070,
    block_size=8,
    vocab_size=248320,
    num_target_layers=64,
    conv_kernel_size=2,
    conv_group_size=16,
    selector_rank=256,
    selector_top_k=16,
    max_position_embeddings=262144,
)
