"""Where a round's time goes: every phase compiled alone, the engine's two programs, and the host.

    python -m experiments.profile_round --draft tiny-dflash2 --rows 4

Rows are full and decode greedily (or at --temperature) from held-out prompts.
"""

import json
import pathlib

import rich.table
from absl import flags

from dflash_jax import Sampling, load_pair
from experiments import cli, round_times
from experiments.prompts import held_out_prompts

_TARGET = flags.DEFINE_string("target", "tiny", "embedded name or Hugging Face directory")
_DRAFT = flags.DEFINE_string("draft", "tiny-dflash2", "likewise; 'none' is plain decoding")
_DRAFT_TOKENS = flags.DEFINE_integer(
    "draft_tokens", None, "proposals per round, 0..15; the trained block less one by default"
)
_DTYPE = flags.DEFINE_string("dtype", "float32", "float32 or bfloat16")
_CONTEXT_DTYPE = flags.DEFINE_string(
    "context_dtype", None, "of the draft's context K/V, where not --dtype"
)
_ROWS = flags.DEFINE_integer("rows", 1, "rows that decode together, 1..8")
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 64, "of each row")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy")
_ROUNDS = flags.DEFINE_integer("rounds", 100, "rounds to measure")
_JSON = flags.DEFINE_string("json", None, "file for the figures")


def main() -> None:
    if _ROUNDS.value < 1:
        raise ValueError(f"--rounds: got {_ROUNDS.value}, expected at least 1")
    draft = None if _DRAFT.value == "none" else _DRAFT.value
    pair = load_pair(_TARGET.value, draft, _DTYPE.value, context_dtype=_CONTEXT_DTYPE.value)
    prompts = held_out_prompts(pair.tokenizer, _ROWS.value, _PROMPT_TOKENS.value)
    figures = round_times.measure(
        pair,
        prompts,
        draft_tokens=_DRAFT_TOKENS.value,
        sampling=Sampling(_TEMPERATURE.value),
        rounds=_ROUNDS.value,
    )
    cli.table_console().print(table(figures))
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps(figures, indent=1) + "\n", "utf-8")


def table(figures: dict) -> rich.table.Table:
    """Microseconds and share of the whole round."""
    view = rich.table.Table(title=figures["engine"])
    view.add_column("")
    view.add_column("us", justify="right")
    view.add_column("% of round", justify="right")
    whole = figures["round"]["whole"]
    for group in ("phases alone", "round"):
        for name, value in figures[group].items():
            view.add_row(name, f"{value:.0f}", f"{100 * value / whole:.0f}")
        view.add_section()
    return view


if __name__ == "__main__":
    cli.run(main)
