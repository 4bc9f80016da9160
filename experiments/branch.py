"""Runs a prompt to a point, forks it, and compares where the branches go.

    python -m experiments.branch --prompt "def main():" --at 16 --seeds 1,2,3 --temperatures 0.8
    python -m experiments.branch --prompt "class A:" --at 8 --widths 7,3,1 --save runs/session
    python -m experiments.branch --load runs/session --seeds 5,6 --temperatures 0.8,1.2

One branch for every seed, temperature and width; the first goes on unchanged where the prompt's
own are among them. `--save` writes the point of the fork to a folder, and `--load` goes on from
it, in another process too; nothing is processed again.
"""

import itertools
import json

import rich.table
from absl import flags

from dflash_jax import Checkpoint, Engine, Request, Sampling, load_pair
from dflash_jax.decoding.result import acceptance_length
from experiments import cli

_PROMPT = flags.DEFINE_string("prompt", None, "text to continue")
_LOAD = flags.DEFINE_string("load", None, "folder of a saved point to go on from, instead")
_SAVE = flags.DEFINE_string("save", None, "folder for the point of the fork")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "--save replaces what the folder holds")
_AT = flags.DEFINE_integer("at", 16, "tokens published before the fork")
_TARGET = flags.DEFINE_string("target", "tiny", "embedded name or Hugging Face directory")
_DRAFT = flags.DEFINE_string("draft", "tiny-dflash2", "likewise; 'none' is plain decoding")
_DTYPE = flags.DEFINE_string("dtype", "float32", "float32 or bfloat16")
_SEED = flags.DEFINE_integer("seed", 0, "of the prompt, up to the fork")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "likewise")
_SEEDS = flags.DEFINE_list("seeds", None, "one branch each; the point's own by default")
_TEMPERATURES = flags.DEFINE_list("temperatures", None, "likewise")
_WIDTHS = flags.DEFINE_list("widths", None, "draft tokens verified per round, likewise")
_MAX_NEW = flags.DEFINE_integer("max_new_tokens", 64, "tokens of each branch, from the prompt on")
_ROWS = flags.DEFINE_integer("rows", 4, "branches decoded together, 1..8")
_CONTEXT = flags.DEFINE_integer("max_context", 1024, "tokens of prompt and output")
_JSON = flags.DEFINE_bool("json", False, "one JSON object a branch instead of a table")


def numbers(flag, kind, default) -> list:
    """Values of a list flag."""
    try:
        return [kind(value) for value in flag.value or [default]]
    except ValueError:
        raise ValueError(
            f"--{flag.name}: got {','.join(flag.value)}, expected a list of {kind.__name__}s"
        ) from None


def run_to_the_fork(engine: Engine) -> Checkpoint:
    """The saved point, or that of the prompt after `--at` tokens."""
    if (_PROMPT.value is None) == (_LOAD.value is None):
        raise ValueError("give either --prompt or --load")
    if _LOAD.value is not None:
        return Checkpoint.load(_LOAD.value)
    if not 1 <= _AT.value < _MAX_NEW.value:
        raise ValueError(f"--at: got {_AT.value}, expected 1..{_MAX_NEW.value - 1}")
    request = engine.submit(
        _PROMPT.value,
        sampling=Sampling(_TEMPERATURE.value),
        seed=_SEED.value,
        max_new_tokens=_MAX_NEW.value,
    )
    while len(request.tokens) < _AT.value and not request.finished:
        engine.step()
    if request.finished:
        raise ValueError(f"--at: the prompt ended after {len(request.tokens)} tokens")
    checkpoint = engine.checkpoint(request)
    engine.cancel(request)
    engine.run()
    return checkpoint


def describe(branch: Request, checkpoint: Checkpoint, temperature: float, first: Request) -> dict:
    """What became of a branch, from the fork on."""
    rounds = branch.rounds[len(checkpoint.record.rounds) :]
    both = zip(branch.tokens, first.tokens, strict=False)
    return {
        "seed": branch.seed,
        "temperature": temperature,
        "draft_tokens": branch.draft_tokens,
        "tokens": len(branch.tokens),
        "as_first": sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both)),
        "rounds": len(rounds),
        "tau": round(acceptance_length(rounds), 3) if any(r.verified for r in rounds) else None,
        "prefilled": branch.prefilled,
        "finish_reason": branch.finish_reason,
        "text": branch.text,
    }


def main() -> None:
    pair = load_pair(_TARGET.value, None if _DRAFT.value == "none" else _DRAFT.value, _DTYPE.value)
    if pair.tokenizer is None:
        raise ValueError(f"--target: {_TARGET.value} has no tokenizer.json")
    engine = Engine(pair, max_rows=_ROWS.value, max_context=_CONTEXT.value)
    checkpoint = run_to_the_fork(engine)
    record = checkpoint.record
    if _SAVE.value is not None:
        checkpoint.save(_SAVE.value, overwrite=_OVERWRITE.value)
    widest = min(record.draft_tokens, engine.spec.draft_tokens)
    kinds = itertools.product(
        numbers(_TEMPERATURES, float, record.sampling.temperature),
        numbers(_WIDTHS, int, widest),
        numbers(_SEEDS, int, record.seed),
    )
    branches = []
    for temperature, width, seed in kinds:
        request = engine.restore(
            checkpoint,
            sampling=Sampling(temperature),
            draft_tokens=width,
            seed=seed,
            max_new_tokens=_MAX_NEW.value,
        )
        branches.append((request, temperature))
    engine.run()
    first = branches[0][0]
    rows = [describe(branch, checkpoint, heat, first) for branch, heat in branches]
    if _JSON.value:
        for row in rows:
            print(json.dumps(row))
        return
    names = [name for name in rows[0] if name != "text"]
    short = {"temperature": "T", "draft_tokens": "K", "as_first": "as first", "finish_reason": ""}
    table = rich.table.Table(
        *(short.get(name, name) for name in names),
        title=f"{len(rows)} branches after {len(record.tokens)} tokens",
        box=None,
    )
    for row in rows:
        table.add_row(*(str(row[name]) for name in names))
    console = cli.table_console()
    console.print(table)
    for number, row in enumerate(rows, 1):
        console.print(f"\n{number}. seed {row['seed']}, T = {row['temperature']}", style="bold")
        console.print(row["text"], markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    cli.run(main)
