"""Trains a Qwen3.5-architecture target with a byte-level BPE tokenizer on Python sources.

    python -m experiments.train_target --workdir runs/target --output dflash_jax/pretrained/tiny

Interrupt it at will: the same command continues from the newest save in `--workdir`.
"""

import pathlib

from absl import flags, logging

from dflash_jax.io.tensors import write_params
from dflash_jax.io.tokenizer import Tokenizer
from dflash_jax.training import corpus, loop, target
from experiments import cli
from experiments.configs import tiny

_WORKDIR = flags.DEFINE_string("workdir", None, "saves, metrics.jsonl", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Hugging Face directory written at the end")
_STEPS = flags.DEFINE_integer("steps", 3000, "optimiser steps", lower_bound=1)
_ROWS = flags.DEFINE_integer("rows", 8, "sequences in a batch", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 256, "tokens in a sequence", lower_bound=2)
_PEAK = flags.DEFINE_float("learning_rate", 4e-3, "peak of the schedule", lower_bound=0.0)
_SEED = flags.DEFINE_integer("seed", 0, "initialisation and batches", lower_bound=0)
_SAVE_EVERY = flags.DEFINE_integer("save_every", 250, "steps between saves", lower_bound=1)


def main() -> None:
    config = tiny.TARGET
    loop.keep_recipe(
        pathlib.Path(_WORKDIR.value),
        {flag.name: flag.value for flag in (_STEPS, _ROWS, _LENGTH, _PEAK, _SEED)},
    )
    texts = (text for _, text in corpus.library_files(held_out=False))
    tokenizer = corpus.train_tokenizer(texts, config.vocab_size)
    codec = Tokenizer(tokenizer, config.eos_token_ids)
    train = corpus.token_stream(codec, held_out=False)
    held_out = corpus.token_stream(codec, held_out=True)
    logging.info("tokens: %d to train on, %d held out", len(train), len(held_out))

    def batch_at(step):
        return corpus.windows(train, _LENGTH.value + 1, _ROWS.value, _SEED.value, step)

    evaluate = target.held_out_loss(config, held_out, rows=8, length=256, batches=8)
    optimiser = loop.adamw(_PEAK.value, _STEPS.value)
    state = loop.run(
        loop.make_step(target.loss_function(config), optimiser),
        loop.init_state(target.init_params(config, _SEED.value), optimiser),
        batch_at,
        _STEPS.value,
        pathlib.Path(_WORKDIR.value),
        save_every=_SAVE_EVERY.value,
        evaluate=evaluate,
    )
    if _OUTPUT.value:
        extra = corpus.tokenizer_files(tokenizer, config.max_position_embeddings)
        write_params(_OUTPUT.value, config, state.params, extra, overwrite=True)
        logging.info("wrote %s", _OUTPUT.value)


if __name__ == "__main__":
    cli.run(main)
