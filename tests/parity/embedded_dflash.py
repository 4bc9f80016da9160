r"""The embedded pairs in the official dflash package: tokens and accepted counts, round by round.

Set-up and cases as in `tests/parity/embedded_transformers.py`; then, from the project root:

    parity/bin/python -m tests.parity.embedded_dflash --cases cases.json

The target is transformers' class, the draft the package's torch model. The package's own loop
does not roll back a Qwen3.5 target's recurrent state; the loop here restores and replays
(`tests/parity/speculative.py`). `--drafts` pairs a field of the cases file with a directory.

Two conventions must be the cases' own for the counts to agree: the draft count (`draft_tokens` of
the case, or --draft_tokens, or the checkpoint's block width - 1) and the extents near the end of
the budget (`max_new_tokens` of the case, or --max_new_tokens, or the number of its tokens;
--tail as `speculative.generate` describes). A case that stopped early at an end-of-sequence token
is compared up to the round that produced its last token.

Exit code 1 on any difference. Each prompt's first differing token is printed with the difference
of the target's two best logits, its first differing round with the smallest margin among that
round's proposals.
"""

import pathlib
import sys

import torch
from absl import app, flags

from tests.parity import embedded_common as common
from tests.parity import presets, speculative

_PRETRAINED = flags.DEFINE_string("pretrained_dir", "dflash_jax/pretrained", "Parent directory.")
_TARGET = flags.DEFINE_string("target", "tiny", "Directory of the target in --pretrained_dir.")
_DRAFTS = flags.DEFINE_list(
    "drafts", ["dflash=tiny-dflash", "dflash2=tiny-dflash2"], "Pairs: field of a case=directory."
)
_CASES = flags.DEFINE_string("cases", None, "JSON of prompts, tokens, accepted.", required=True)
_PROMPTS = flags.DEFINE_integer("prompts", 16, "How many cases to run.")
_TOKENS = flags.DEFINE_integer("max_new_tokens", None, "Budget the cases were made with.")
_DRAFT_TOKENS = flags.DEFINE_integer("draft_tokens", None, "Draft count the cases were made with.")
_TAIL = flags.DEFINE_enum(
    "tail", "specification", ["specification", "package"], "Extents near the end of the budget."
)
_JSON = flags.DEFINE_string("json", None, "Write a summary here.")


def check_case(index: int, case: dict, field: str, target, draft, report: common.Report) -> None:
    """Generates one case's text and compares."""
    tokens, accepted = case["tokens"], case[field]["accepted"]
    prompt = torch.tensor([case["prompt"]])
    budget = case.get("max_new_tokens", _TOKENS.value or len(tokens))
    draft_tokens = case.get("draft_tokens", _DRAFT_TOKENS.value)
    trace = speculative.generate(target, draft, prompt, budget, draft_tokens, _TAIL.value)

    length = len(tokens)
    ours = trace.ids[0, prompt.shape[1] :].tolist()
    if length < budget:  # stopped early: drop what came after
        ours = ours[:length]
    rounds, produced = 0, 1
    while rounds < len(trace.published) and produced < length:
        produced += trace.published[rounds]
        rounds += 1
    report.count(length, rounds, sum(trace.accepted[:rounds]))
    report.add(common.first_difference(index, "token", tokens, ours, trace.gaps))
    report.add(
        common.first_difference(
            index, "accepted in round", accepted, trace.accepted[:rounds], trace.draft_gaps
        )
    )


def main(_) -> None:
    cases = common.load_cases(_CASES.value, _PROMPTS.value)
    root = pathlib.Path(_PRETRAINED.value)
    target = common.load_target(root / _TARGET.value)
    summaries = []
    for pair in _DRAFTS.value:
        field, _, name = pair.partition("=")
        if not name:
            raise app.UsageError(f"--drafts: {pair!r}, expected field=directory")
        draft = presets.load_draft(root / name)
        report = common.Report(f"dflash {name}")
        for i, case in enumerate(cases):
            check_case(i, case, field, target, draft, report)
        summaries.append(report.finish())
    common.write_json(_JSON.value, summaries)
    sys.exit(any(s["differences"] for s in summaries))


if __name__ == "__main__":
    app.run(main)
