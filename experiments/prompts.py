"""The held-out prompts: windows of library files that neither target nor drafts were trained on.

`heldout.json` is committed, so that figures do not depend on the interpreter that measures them.
`experiments.make_prompts` made it.
"""

import hashlib
import json
import pathlib
import re

from dflash_jax.io.tokenizer import Tokenizer
from dflash_jax.training import corpus

FILE = pathlib.Path(__file__).with_name("heldout.json")
_CHARACTERS = 2400  # more than 700 tokens
_DEFINITION = re.compile(r"^(def|class) ", re.MULTILINE)


def held_out_prompts(tokenizer: Tokenizer | None, count: int, tokens: int) -> list[list[int]]:
    """Token ids of the first `count` held-out prompts, each cut to its first `tokens` tokens.

    Raises:
      ValueError: more prompts, or longer ones, than the file has, or no tokenizer.
    """
    if tokenizer is None:
        raise ValueError("held-out prompts are text, but the target has no tokenizer.json")
    entries = json.loads(FILE.read_text(encoding="utf-8"))
    if not 1 <= count <= len(entries):
        raise ValueError(f"prompts: got {count}, expected 1..{len(entries)}")
    prompts = [tokenizer.encode(entry["text"]) for entry in entries[:count]]
    shortest = min(map(len, prompts))
    if not 1 <= tokens <= shortest:
        raise ValueError(f"prompt tokens: got {tokens}, expected 1..{shortest}")
    return [prompt[:tokens] for prompt in prompts]


def choose(count: int) -> list[dict[str, str]]:
    """`count` windows that start at a top-level definition, one per held-out file."""
    entries = []
    for name, text in corpus.library_files(held_out=True):
        starts = [match.start() for match in _DEFINITION.finditer(text)]
        starts = [at for at in starts if at + _CHARACTERS <= len(text)]
        if starts:
            # A fixed function of the name, as the split itself.
            at = starts[sum(name.encode()) % len(starts)]
            entries.append({"source": name, "text": text[at : at + _CHARACTERS]})
    entries.sort(key=lambda entry: hash_of(entry["source"]))
    return entries[:count]


def hash_of(name: str) -> bytes:
    """Order of the prompts, unrelated to the alphabet."""
    return hashlib.sha256(b"prompt" + name.encode()).digest()
