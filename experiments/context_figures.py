"""What checkpoints cost: bytes that a fork shares and copies, and how fast they move and are saved.

    python -m experiments.context_figures --tokens 4032

A prompt of so many tokens is processed once; then it is forked, taken to the host, saved, loaded
and restored. Times are medians over `--repeats`.
"""

import json
import pathlib
import statistics
import tempfile
import time

import numpy as np
import rich.table
from absl import flags

from dflash_jax import Checkpoint, Engine, load_pair
from experiments import cli

_TARGET = flags.DEFINE_string("target", "tiny", "embedded name or Hugging Face directory")
_DRAFT = flags.DEFINE_string("draft", "tiny-dflash2", "likewise; 'none' is plain decoding")
_DTYPE = flags.DEFINE_string("dtype", "float32", "float32 or bfloat16")
_TOKENS = flags.DEFINE_integer("tokens", 4032, "tokens of the context")
_REPEATS = flags.DEFINE_integer("repeats", 5, "times that each is measured")
_DIRECTORY = flags.DEFINE_string("directory", None, "where to save; a temporary one by default")
_JSON = flags.DEFINE_bool("json", False, "one JSON object instead of a table")

GROWTH = 48  # tokens that parent and fork may publish


def seconds(repeats: int, function) -> tuple[float, list]:
    """Median time and the results."""
    taken, results = [], []
    for _ in range(repeats):
        begin = time.perf_counter()
        results.append(function())
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken), results


def measure(engine: Engine, tokens: int, repeats: int, directory: pathlib.Path) -> dict:
    """Bytes and seconds; see the keys."""
    vocabulary = engine.pair.public_vocab
    prompt = np.random.default_rng(0).integers(vocabulary, size=tokens).tolist()
    parent = engine.submit(prompt, max_new_tokens=GROWTH, ignore_eos=True)
    begin = time.perf_counter()
    while not parent.tokens:
        engine.step()
    figures = {"tokens": tokens, "prefill s": time.perf_counter() - begin}
    allocator, page = engine.batch.allocator, engine.batch.page_bytes()
    before = allocator.used
    figures["checkpoint s"], (checkpoint, *others) = seconds(
        repeats, lambda: engine.checkpoint(parent)
    )
    del others
    whole = checkpoint.frontier // allocator.page_size
    figures["checkpoint: pages taken"] = allocator.used - before
    figures["checkpoint: bytes copied"] = checkpoint.nbytes
    engine.fork(parent)
    engine.step()
    figures["fork: bytes of pages shared"] = whole * page
    figures["fork: bytes of pages of its own"] = (allocator.used - before) * page
    engine.run()
    figures["host s"], _ = seconds(repeats, checkpoint.parts)
    checkpoint.to_host()
    size = checkpoint.nbytes
    figures["host: bytes"] = size
    names = iter(range(repeats))
    save, _ = seconds(repeats, lambda: checkpoint.save(directory / str(next(names))))
    load, loaded = seconds(repeats, lambda: Checkpoint.load(directory / "0"))
    figures |= {"save s": save, "save MB/s": size / save / 1e6}
    figures |= {"load s": load, "load MB/s": size / load / 1e6}
    restored = engine.restore(loaded[0])
    begin = time.perf_counter()
    engine.step()
    figures["restore and first round s"] = time.perf_counter() - begin
    engine.run()
    if restored.tokens != parent.tokens:
        raise AssertionError("the restored request said something else")
    return figures


def main() -> None:
    for flag in (_TOKENS, _REPEATS):
        if flag.value < 1:
            raise ValueError(f"--{flag.name}: got {flag.value}, expected at least 1")
    pair = load_pair(_TARGET.value, None if _DRAFT.value == "none" else _DRAFT.value, _DTYPE.value)
    context = _TOKENS.value + GROWTH
    engine = Engine(pair, max_rows=2, max_context=context)
    with tempfile.TemporaryDirectory(dir=_DIRECTORY.value) as directory:
        figures = measure(engine, _TOKENS.value, _REPEATS.value, pathlib.Path(directory))
    if _JSON.value:
        print(json.dumps(figures))
        return
    table = rich.table.Table("", "", title=engine.describe())
    table.columns[1].justify = "right"
    for name, value in figures.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:,.4f}")
    cli.table_console().print(table)


if __name__ == "__main__":
    cli.run(main)
