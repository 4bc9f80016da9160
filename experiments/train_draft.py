"""Trains a DFlash or DFlash2 draft on a target's own continuations.

    python -m experiments.train_draft --kind dflash2 --target dflash_jax/pretrained/tiny \
        --workdir runs/dflash2 --data runs/continuations.npz \
        --output dflash_jax/pretrained/tiny-dflash2

The first run makes the continuations (half greedy, half at temperature 1) and keeps them in
`--data`; drafts trained from the same file differ in the model only. Interrupt it at will: the
same command continues from the newest save in `--workdir`.
"""

import pathlib

from absl import flags, logging

from dflash_jax.config import DraftConfig, check_pair
from dflash_jax.io.pair import load_pair
from dflash_jax.io.tensors import write_params
from dflash_jax.training import corpus, draft, loop
from dflash_jax.training.anchors import draw_anchors
from dflash_jax.training.continuations import load_or_make, make_continuations
from dflash_jax.typing import Params
from experiments import cli
from experiments.configs import tiny

_KIND = flags.DEFINE_enum("kind", "dflash2", ["dflash", "dflash2"], "which draft")
_TARGET = flags.DEFINE_string("target", "tiny", "embedded name or Hugging Face directory")
_WORKDIR = flags.DEFINE_string("workdir", None, "saves, metrics.jsonl", required=True)
_DATA = flags.DEFINE_string("data", None, "continuations (.npz), made when absent", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Hugging Face directory written at the end")
_SEQUENCES = flags.DEFINE_integer("sequences", 4096, "continuations to make", lower_bound=1)
_PROMPT = flags.DEFINE_integer("prompt", 64, "corpus tokens before a continuation", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 320, "tokens of prompt and continuation", lower_bound=2)
_STEPS = flags.DEFINE_integer("steps", 2000, "optimiser steps", lower_bound=1)
_ROWS = flags.DEFINE_integer("rows", 8, "sequences in a batch", lower_bound=1)
_ANCHORS = flags.DEFINE_integer("anchors", 32, "blocks per sequence", lower_bound=1)
_PEAK = flags.DEFINE_float("learning_rate", 2e-3, "peak of the schedule", lower_bound=0.0)
_GAMMA = flags.DEFINE_float("gamma", 4.0, "decay of the column weights", lower_bound=1e-3)
_SOFT = flags.DEFINE_bool("soft", True, "learn the target's law on sampled rows")
_OUTSIDE = flags.DEFINE_enum("outside", "replace", ["replace", "skip"], "gold not in the top-k")
_SEED = flags.DEFINE_integer("seed", 0, "initialisation, data and batches", lower_bound=0)
_INIT = flags.DEFINE_string("init", None, "trained draft to start from instead of fresh weights")
_SAVE_EVERY = flags.DEFINE_integer("save_every", 250, "steps between saves", lower_bound=1)


def initial_params(config: DraftConfig) -> Params:
    """Fresh parameters, or those of `--init`, whose geometry must be the one trained here."""
    if _INIT.value is None:
        return draft.init_params(config, _SEED.value)
    pair = load_pair(_TARGET.value, _INIT.value)
    if pair.draft != config:
        raise ValueError(f"--init: {_INIT.value} is not a {_KIND.value} draft of this geometry")
    return pair.draft_params


def main() -> None:
    config = tiny.DFLASH2 if _KIND.value == "dflash2" else tiny.DFLASH
    pair = load_pair(_TARGET.value, None)
    if pair.tokenizer is None:
        raise ValueError(f"{_TARGET.value}: no tokenizer.json, which the prompts need")
    check_pair(pair.target, config, pair.tokenizer.vocab_size)
    recipe = (
        *(_KIND, _TARGET, _DATA, _PROMPT, _STEPS, _ROWS, _ANCHORS),
        *(_PEAK, _GAMMA, _SOFT, _OUTSIDE, _SEED, _INIT),
    )
    loop.keep_recipe(pathlib.Path(_WORKDIR.value), {flag.name: flag.value for flag in recipe})
    stream = corpus.token_stream(pair.tokenizer, held_out=False)

    def continuations():
        return make_continuations(
            pair.target,
            pair.target_params,
            stream,
            sequences=_SEQUENCES.value,
            prompt=_PROMPT.value,
            length=_LENGTH.value,
            public_vocab=pair.public_vocab,
            seed=_SEED.value,
        )

    tokens, greedy = load_or_make(pathlib.Path(_DATA.value), continuations)
    if tokens.shape != (_SEQUENCES.value, _LENGTH.value):
        raise ValueError(
            f"--data: {_DATA.value} holds {len(tokens)} sequences of {tokens.shape[1]} tokens, but "
            f"--sequences is {_SEQUENCES.value} and --length {_LENGTH.value}"
        )
    draft_tokens = config.block_size - 1
    logging.info("%d continuations of %d tokens", *tokens.shape)

    def batch_at(step):
        at = draft.pick_rows(len(tokens), _ROWS.value, _SEED.value, step)
        anchors = draw_anchors(
            _ROWS.value, _ANCHORS.value, _PROMPT.value, tokens.shape[1], draft_tokens,
            _SEED.value, step,
        )  # fmt: skip
        return draft.Batch(tokens[at], greedy[at], anchors)

    recipe = draft.DraftLoss(gamma=_GAMMA.value, soft=_SOFT.value, outside=_OUTSIDE.value)
    loss = draft.make_loss(
        pair.target, pair.target_params, config, draft_tokens, pair.public_vocab, recipe
    )
    optimiser = loop.adamw(_PEAK.value, _STEPS.value)
    state = loop.run(
        loop.make_step(loss, optimiser),
        loop.init_state(initial_params(config), optimiser),
        batch_at,
        _STEPS.value,
        pathlib.Path(_WORKDIR.value),
        save_every=_SAVE_EVERY.value,
    )
    if _OUTPUT.value:
        write_params(_OUTPUT.value, config, state.params, overwrite=True)
        logging.info("wrote %s", _OUTPUT.value)


if __name__ == "__main__":
    cli.run(main)
