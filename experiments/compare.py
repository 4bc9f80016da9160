"""Plain decoding, DFlash and DFlash2 side by side on the held-out prompts.

    python -m experiments.compare
    python -m experiments.compare --temperature 1 --json figures.json

One run measures everything it relates: tokens/s of whole generations (compilation and prefill
left out), acceptance, the cost of a verify (c_v) and of a draft (c_d) in plain steps, and the
speed that the cost model tau / (c_v + c_d) predicts from them.
"""

import json
import pathlib

from absl import flags

from dflash_jax import load_pair
from experiments import cli, measure, show
from experiments.prompts import held_out_prompts

_TARGET = flags.DEFINE_string("target", "tiny", "embedded name or Hugging Face directory")
_DRAFTS = flags.DEFINE_list("drafts", ["tiny-dflash", "tiny-dflash2"], "drafts to compare")
_HEAD = flags.DEFINE_string(
    "proposal_head", None, "also measure each draft with this indexed proposal head"
)
_DRAFT_TOKENS = flags.DEFINE_integer("draft_tokens", 7, "proposals per round, 1..15")
_PROMPTS = flags.DEFINE_integer("prompts", 64, "held-out prompts")
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 128, "tokens of each prompt")
_MAX_NEW = flags.DEFINE_integer("max_new_tokens", 128, "tokens generated per prompt")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy")
_SEED = flags.DEFINE_integer("seed", 0, "prompt i has seed + i")
_DTYPE = flags.DEFINE_string("dtype", "float32", "float32 or bfloat16")
_CONTEXT_DTYPE = flags.DEFINE_string(
    "context_dtype", None, "of the draft's context K/V, where not --dtype"
)
_ROWS = flags.DEFINE_integer("rows", 1, "prompts decoded together, 1..8")
_JSON = flags.DEFINE_string("json", None, "file for the same figures as JSON")


def main() -> None:
    if not 1 <= _DRAFT_TOKENS.value <= 15:
        raise ValueError(f"--draft_tokens: got {_DRAFT_TOKENS.value}, expected 1..15")
    if not 1 <= _ROWS.value <= 8:
        raise ValueError(f"--rows: got {_ROWS.value}, expected 1..8")
    figures = measure.compare(
        target=_TARGET.value,
        drafts=_DRAFTS.value,
        prompts=held_out_prompts(
            load_pair(_TARGET.value, None).tokenizer, _PROMPTS.value, _PROMPT_TOKENS.value
        ),
        rows=_ROWS.value,
        draft_tokens=_DRAFT_TOKENS.value,
        max_new_tokens=_MAX_NEW.value,
        temperature=_TEMPERATURE.value,
        seed=_SEED.value,
        dtype=_DTYPE.value,
        context_dtype=_CONTEXT_DTYPE.value,
        proposal_head=_HEAD.value,
    )
    show.print_comparison(cli.table_console(), figures)
    if _JSON.value:
        text = json.dumps(show.without_nan(figures), indent=2, allow_nan=False)
        pathlib.Path(_JSON.value).write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    cli.run(main)
