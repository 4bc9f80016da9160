"""Tiny random pairs: the real modules at sizes that compile in seconds, and their text.

Target: four layers, one of them full attention (two in the small one, for tests that compile
many programs); window of the draft's rings: 8 slots. Token 0 is never the target's choice (its
head row is zero), so that a draft that proposes nothing else is always wrong.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.config.draft import FULL, SLIDING
from dflash_jax.config.target import LINEAR
from dflash_jax.decoding import round as phases
from dflash_jax.decoding.distribution import Controls, Sampling, make_controls
from dflash_jax.decoding.spec import Spec, Weights
from dflash_jax.io.pair import Pair
from dflash_jax.precision import compute_dtype
from dflash_jax.state.sequence import init_sequences
from dflash_jax.training import draft as draft_training
from dflash_jax.training import target as target_training

WINDOW = 8
VOCAB = 64
MASK = 61

TARGET = TargetConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    rms_norm_eps=1e-6,
    layer_types=(LINEAR, FULL, LINEAR, LINEAR),
    tie_word_embeddings=False,
    rope_theta=1e4,
    partial_rotary_factor=0.5,
    mrope_section=(2, 1, 1),
    linear_conv_kernel_dim=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    max_position_embeddings=4096,
)
SMALL = dataclasses.replace(TARGET, num_hidden_layers=2, layer_types=(LINEAR, FULL))
DFLASH = DraftConfig(
    dflash2=False,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    layer_types=(SLIDING, FULL),
    sliding_window=WINDOW,
    target_layer_ids=(0, 3),
    mask_token_id=MASK,
    block_size=8,
    vocab_size=VOCAB,
)
DFLASH2 = dataclasses.replace(
    DFLASH,
    dflash2=True,
    layer_types=(SLIDING, SLIDING),
    conv_kernel_size=2,
    conv_group_size=8,
    selector_rank=4,
    selector_top_k=4,
)


def random_params(init, config, seed, dtype="float32"):
    """Values for the tree that `init(config, seed)` would make, without compiling it.

    Every leaf is random, gains and gates too: a leaf that is read from the wrong place shows.
    """
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: init(config, 0))
    is_target = isinstance(config, TargetConfig)

    def leaf(path, like):
        names = [part.key for part in path]
        value = rng.normal(size=like.shape)
        if names[-1] == "A_log":
            return jnp.asarray(np.log(rng.uniform(1, 16, like.shape)), jnp.float32)
        if names[-1] == "dt_bias":
            return jnp.asarray(value - 4, jnp.float32)
        if any("norm" in name for name in names):
            # The target's text norms store w of 1 + w, every other norm the gain itself.
            value = 0.2 * value + (0 if is_target and "linear_attn" not in names else 1)
        elif names[-1] == "base_kernel":
            value = 0.2 * value + np.eye(1, like.shape[1])[..., None]
        elif len(like.shape) == 2 and "codebook" not in names[-1] and "embed_tokens" not in names:
            value = value * like.shape[-1] ** -0.5
        return jnp.asarray(value, compute_dtype(dtype))

    return jax.tree_util.tree_map_with_path(leaf, shapes)


@functools.cache
def target_params(config, dtype="float32"):
    params = random_params(target_training.init_params, config, 11, dtype)
    head = params["lm_head"]["weight"]
    params["lm_head"]["weight"] = head.at[0].set(0.0)
    # A faint mask: what the block attends to then decides the proposals.
    table = params["model"]["embed_tokens"]
    table["weight"] = table["weight"].at[MASK].multiply(0.02)
    return params


@functools.cache
def draft_params(config, dtype="float32"):
    return random_params(draft_training.init_params, config, 22, dtype)


@functools.cache
def pair(draft: DraftConfig | None, dtype: str = "float32", target: TargetConfig = TARGET) -> Pair:
    """A target with an untrained draft, which taps its first and last layer."""
    params = None
    if draft is not None:
        draft = dataclasses.replace(draft, target_layer_ids=(0, target.num_hidden_layers - 1))
        params = draft_params(draft, dtype)
    return Pair(target, target_params(target, dtype), draft, params, None, dtype)


def always_wrong(pair: Pair) -> Pair:
    """The same pair with a draft that proposes token 0 throughout."""
    params = dict(pair.draft_params)
    params["norm"] = jax.tree.map(jnp.zeros_like, params["norm"])
    return dataclasses.replace(pair, draft_params=params)


def prompts(count: int, seed: int = 5, shortest: int = 1, longest: int = 60) -> list[list[int]]:
    """The first of eight ragged prompts; the first two have the two extreme lengths."""
    rng = np.random.default_rng(seed)
    lengths = [shortest, longest, *rng.integers(shortest, longest + 1, size=6)]
    return [rng.integers(VOCAB, size=length).tolist() for length in lengths][:count]


class Phases:
    """The phases of a round for one pair and width, each compiled on its own.

    `commit` needs no spec. Nothing is donated: a state may be used again.
    """

    def __init__(self, pair: Pair, draft_tokens: int):
        draft = pair.draft if draft_tokens else None
        self.spec = Spec(pair.target, draft, draft_tokens, pair.public_vocab, pair.dtype)
        self.weights = Weights(pair.target_params, pair.draft_params if draft else None)
        for name in ("prefill", "select_anchor", "catch_up", "propose"):
            setattr(self, name, functools.partial(COMPILED[name], self.spec, self.weights))
        self.accept = functools.partial(COMPILED["accept"], self.spec)
        self.commit = COMPILED["commit"]

    def verify(self, state, proposal, active=None):
        active = jnp.ones(len(state.frontier), bool) if active is None else jnp.asarray(active)
        return COMPILED["verify"](self.spec, self.weights, state, proposal, active)

    def init(self, seeds, capacity: int = 256, page_size: int = 8):
        """Empty sequences whose pages lie scattered over the pools."""
        seeds = jnp.asarray(seeds, jnp.uint32)
        state = init_sequences(
            self.spec.target, self.spec.draft, seeds, capacity, self.spec.width,
            self.spec.dtype, page_size,
        )  # fmt: skip
        kv, draft = scattered(state.target.kv, 1), state.draft
        if draft is not None and draft.pages is not None:
            draft = draft._replace(pages=scattered(draft.pages, 2))
        return state._replace(target=state.target._replace(kv=kv), draft=draft)

    def start(self, prompts, controls=None, seeds=None, chunk: int | None = None, columns=64):
        """State after the prompts, anchors chosen.

        Prompts are fed `chunk` tokens at a time (as many as fit) in calls `columns` wide.
        """
        state = self.init(range(len(prompts)) if seeds is None else seeds)
        lengths = np.array([len(prompt) for prompt in prompts])
        chunk = chunk or columns
        for begin in range(0, lengths.max(), chunk):
            tokens = np.zeros((len(prompts), columns), np.int32)
            for row, prompt in enumerate(prompts):
                part = prompt[begin : begin + chunk]
                tokens[row, : len(part)] = part
            state = self.prefill(state, tokens, np.clip(lengths - begin, 0, chunk))
        return self.select_anchor(state, controls or greedy(len(prompts)))


def scattered(pool, seed):
    """The pool with its pages dealt out in random order."""
    order = np.random.default_rng(seed).permutation(pool.key.shape[1]).astype(np.int32)
    return pool._replace(block_table=jnp.asarray(order)[pool.block_table])


def greedy(rows: int) -> Controls:
    return make_controls([Sampling()] * rows)


COMPILED = {
    name: jax.jit(getattr(phases, name), static_argnums=0)
    for name in ("prefill", "select_anchor", "catch_up", "propose", "verify", "accept")
}
COMPILED["commit"] = jax.jit(phases.commit)
