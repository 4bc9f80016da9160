"""Toy pairs whose every emission can be enumerated: vocabularies of 4 to 12, random weights.

The head has two rows beyond the public vocabulary that score far above all others; a token that
leaks out of them is seen at once.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.config import target as kinds
from dflash_jax.config.draft import FULL, SLIDING
from dflash_jax.decoding.certificate import Subject
from dflash_jax.decoding.spec import Spec, Weights
from dflash_jax.training import draft as draft_training
from dflash_jax.training import target as target_training
from experiments.configs import tiny

PADDING = 2
PROMPT_TOKENS = 5


def make_toy(public_vocab: int, dflash2: bool, draft_tokens: int, seed: int = 0) -> Subject:
    """A pair over `public_vocab` tokens with every weight random."""
    vocabulary = public_vocab + PADDING
    target = dataclasses.replace(
        tiny.TARGET,
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        layer_types=(kinds.LINEAR, kinds.FULL),
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        partial_rotary_factor=0.5,
        mrope_section=(2, 1, 1),
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        tie_word_embeddings=False,
        eos_token_ids=(),
    )
    draft = dataclasses.replace(
        tiny.DFLASH2 if dflash2 else tiny.DFLASH,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        rope_theta=1e4,
        layer_types=(SLIDING, SLIDING) if dflash2 else (SLIDING, FULL),
        sliding_window=8,
        target_layer_ids=(0, 1),
        mask_token_id=public_vocab,
        block_size=draft_tokens + 1,
        vocab_size=vocabulary,
        num_target_layers=2,
    )
    if dflash2:
        draft = dataclasses.replace(draft, conv_group_size=8, selector_rank=4, selector_top_k=3)
    params = _random(target_training.init_params, target, seed)
    head = params["lm_head"]["weight"]
    # The laws are peaked enough for proposals to be accepted and rejected in earnest. With logits
    # twice as large two float32 forwards differ by up to 1.1e-6 in a probability; as they are, by
    # 5e-7 at most over seeds, and no fault is needed to explain that.
    head = head.at[public_vocab:].multiply(40)
    params["lm_head"]["weight"] = head
    weights = Weights(params, _random(draft_training.init_params, draft, seed + 1))
    prompt = np.random.default_rng(seed).integers(public_vocab, size=PROMPT_TOKENS)
    return Subject(Spec(target, draft, draft_tokens, public_vocab), weights, tuple(prompt.tolist()))


def _random(init, config, seed: int):
    """Random values for the tree that `init(config, seed)` makes: no leaf is left at its start."""
    rng = np.random.default_rng(seed)

    def leaf(path, like):
        name, value = path[-1].key, rng.normal(size=like.shape)
        if name == "A_log":
            value = np.log(rng.uniform(1, 16, like.shape))
        elif name == "dt_bias":
            value -= 4
        elif any("norm" in part.key for part in path):
            value = 1 + 0.2 * value
        elif name == "weight":
            value *= like.shape[-1] ** -0.5
        return jnp.asarray(value, jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, jax.eval_shape(lambda: init(config, 0)))
