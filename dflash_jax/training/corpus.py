"""Text to train on: the Python standard library's sources of the running interpreter.

A fixed tenth of the files, chosen by a hash of their path, is held out: it depends on nothing
but the file's name, so every script that asks agrees on it.
"""

import hashlib
import json
import pathlib
import sysconfig
from collections.abc import Iterator

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from dflash_jax.io.tokenizer import Tokenizer

END_OF_TEXT = "<|endoftext|>"
MASK = "<|mask|>"
# Generated tables rather than code; they would teach a small model nothing but digits.
_TABLES = ("encodings/", "pydoc_data/", "lib2to3/tests/data/", "test/test_email/data")


def is_held_out(name: str) -> bool:
    """Whether the file with this path relative to the library is in the held-out tenth."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 10 == 0


def library_files(held_out: bool) -> Iterator[tuple[str, str]]:
    """(relative path, text) of every readable source file of one side of the split, sorted."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages/" in name or name.startswith(_TABLES) or is_held_out(name) != held_out:
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue  # some test inputs are written in other encodings on purpose
        if text.strip():
            yield name, text


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Byte-level BPE with the end-of-text and mask tokens as ids 0 and 1."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_files(tokenizer: tokenizers.Tokenizer, max_length: int) -> dict[str, str]:
    """The files that make a checkpoint directory loadable as a Hugging Face fast tokenizer."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "mask_token": MASK,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=False),
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
    }


def token_stream(tokenizer: Tokenizer, held_out: bool) -> np.ndarray:
    """All files of one side of the split as one int32 stream, end-of-text after each.

    Raises:
      ValueError: the tokenizer names no single end-of-text token.
    """
    if len(tokenizer.eos_token_ids) != 1:
        raise ValueError(f"tokenizer: eos tokens {tokenizer.eos_token_ids}, expected exactly one")
    (end,) = tokenizer.eos_token_ids
    pieces = [tokenizer.encode(text) + [end] for _, text in library_files(held_out)]
    return np.concatenate([np.asarray(piece, np.int32) for piece in pieces])


def windows(stream: np.ndarray, length: int, rows: int, seed: int, step: int) -> np.ndarray:
    """`[rows, length]` windows of the stream.

    Which windows belong to `step` depends on (seed, step) only, so a resumed run sees the batches
    the uninterrupted one would have seen.
    """
    starts = np.random.default_rng((seed, step)).integers(0, len(stream) - length, rows)
    return stream[starts[:, None] + np.arange(length)]
