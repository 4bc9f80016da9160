"""Writes this project's greedy decoding of held-out prompts for `tests/parity/embedded_*.py`.

    python -m experiments.export_cases --output cases.json
"""

import json
import pathlib

from absl import flags

from dflash_jax import generate, load_pair
from experiments import cli
from experiments.prompts import held_out_prompts

_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write", required=True)
_PROMPTS = flags.DEFINE_integer("prompts", 16, "held-out prompts")
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 96, "tokens of each prompt")
_MAX_NEW = flags.DEFINE_integer("max_new_tokens", 128, "tokens generated per prompt")
_DRAFT_TOKENS = flags.DEFINE_integer("draft_tokens", 7, "proposals per round, 1..15")
_DRAFTS = {"dflash": "tiny-dflash", "dflash2": "tiny-dflash2"}


def main() -> None:
    pairs = {kind: load_pair("tiny", name) for kind, name in _DRAFTS.items()}
    tokenizer = pairs["dflash"].tokenizer
    cases = []
    for prompt in held_out_prompts(tokenizer, _PROMPTS.value, _PROMPT_TOKENS.value):
        case = {
            "prompt": prompt,
            "max_new_tokens": _MAX_NEW.value,
            "draft_tokens": _DRAFT_TOKENS.value,
        }
        for kind, pair in pairs.items():
            (result,) = generate(
                pair,
                prompt,
                draft_tokens=_DRAFT_TOKENS.value,
                max_new_tokens=_MAX_NEW.value,
            )
            case.setdefault("tokens", result.tokens)
            if case["tokens"] != result.tokens:
                raise ValueError(f"prompt {len(cases)}: drafts disagree on the text")
            case[kind] = {"accepted": [r.accepted for r in result.rounds]}
        cases.append(case)
    pathlib.Path(_OUTPUT.value).write_text(json.dumps(cases) + "\n", encoding="utf-8")
    print(f"wrote {len(cases)} cases to {_OUTPUT.value}")


if __name__ == "__main__":
    cli.run(main)
