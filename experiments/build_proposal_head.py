"""Builds an indexed proposal head: the tokens a draft may propose, by frequency in a corpus.

    python -m experiments.build_proposal_head --rows 512 --output runs/head512.safetensors
    python -m experiments.compare --proposal_head runs/head512.safetensors

A smaller head makes the proposal cheaper and misses rare tokens; what is emitted stays the
target's choice. The corpus is the training side of the embedded pair's, or a text file.
"""


import numpy as np
from absl import flags

from dflash_jax.io import proposal_head
from dflash_jax.io.pair import load_pair
from dflash_jax.training import corpus
from experiments import cli

_TARGET = flags.DEFINE_string("target", "tiny", "embedded name or Hugging Face directory")
_ROWS = flags.DEFINE_integer("rows", None, "tokens to keep", required=True, lower_bound=1)
_TEXT = flags.DEFINE_string("text", None, "UTF-8 file to count instead of the embedded corpus")
_OUTPUT = flags.DEFINE_string(
    "output", None, f"file to write; {proposal_head.FILE_NAME} beside the draft is found by name",
    required=True,
)  # fmt: skip


def main() -> None:
    pair = load_pair(_TARGET.value, None)
    if pair.tokenizer is None:
        raise ValueError(f"{_TARGET.value}: no tokenizer.json, which counting needs")
    if _TEXT.value:
        tokens = np.asarray(pair.tokenizer.encode(cli.read_text(_TEXT.value)), np.int64)
    else:
        tokens = corpus.token_stream(pair.tokenizer, held_out=False)
    ids = proposal_head.frequent_tokens(tokens, _ROWS.value, pair.public_vocab)
    proposal_head.write_token_ids(_OUTPUT.value, ids)
    share = np.isin(tokens, ids).mean() if len(tokens) else float("nan")
    print(f"{_OUTPUT.value}: {len(ids)} of {pair.public_vocab} tokens, {share:.1%} of the corpus")


if __name__ == "__main__":
    cli.run(main)
