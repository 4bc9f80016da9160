r"""The embedded target in transformers: greedy text against this project's, token by token.

Set up once (CPU wheels suffice); the cases come from this project's own environment:

    python -m venv parity && parity/bin/pip install torch==2.13.0 transformers==5.15.0 \
        dflash==0.1.0 safetensors numpy absl-py
    python -m experiments.export_cases --output cases.json
    parity/bin/python -m tests.parity.embedded_transformers --cases cases.json

Run from the project root. Float32, one thread. Exit code 1 on any difference; each prompt's first
one is printed with the difference of transformers' two best logits there: a value near 1e-4 is
a tie that rounding decides, a large one is a fault.
"""

import pathlib
import sys

import torch
from absl import app, flags

from tests.parity import embedded_common as common
from tests.parity.target_outputs import greedy

_PRETRAINED = flags.DEFINE_string("pretrained_dir", "dflash_jax/pretrained", "Parent directory.")
_TARGET = flags.DEFINE_string("target", "tiny", "Directory of the target in --pretrained_dir.")
_CASES = flags.DEFINE_string("cases", None, "JSON of prompts and tokens.", required=True)
_PROMPTS = flags.DEFINE_integer("prompts", 16, "How many cases to run.")
_TOKENS = flags.DEFINE_integer(
    "max_new_tokens", None, "Compare at most so many tokens; default: all tokens of each case."
)
_JSON = flags.DEFINE_string("json", None, "Write a summary here.")


def main(_) -> None:
    cases = common.load_cases(_CASES.value, _PROMPTS.value)
    target = common.load_target(pathlib.Path(_PRETRAINED.value) / _TARGET.value)
    report = common.Report(f"transformers {_TARGET.value}")
    for i, case in enumerate(cases):
        prompt, tokens = torch.tensor([case["prompt"]]), case["tokens"][: _TOKENS.value]
        ids, gaps = greedy(target, prompt, len(tokens))
        ours = ids[0, prompt.shape[1] :].tolist()
        report.count(len(tokens))
        report.add(common.first_difference(i, "token", tokens, ours, gaps.tolist()))
    common.write_json(_JSON.value, [report.finish()])
    sys.exit(bool(report.differences))


if __name__ == "__main__":
    app.run(main)
