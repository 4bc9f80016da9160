"""Certifies that speculation leaves the target's law alone. One page; exit code 1 on failure.

    python -m experiments.certify
    python -m experiments.certify --short --json certificate.json

1. Toy pairs (vocabularies of 4 to 12): the law of whole emitted sequences, enumerated through
   the functions that decode, against the chain rule in float64; then generations of the compiled
   loop itself, chi-square against the same law.
2. The embedded pair: chi-square of sampled next tokens and three-token sequences.
3. The embedded pair, greedy: token for token against plain decoding.
"""

import json
import pathlib
import sys
import time
from functools import partial

import rich.console
import rich.table
from absl import flags

from dflash_jax import generate, load_pair
from experiments import cli
from experiments.exactness import (
    CONTROLS,
    EXACT,
    SIGNIFICANCE,
    SIZES,
    at_once,
    certify_greedy,
    certify_samples,
    certify_toys,
    correct_and_judge,
)
from experiments.prompts import held_out_prompts

_SHORT = flags.DEFINE_bool(
    "short", False, "one vocabulary, fewer samples, the last of the drafts, no greedy part"
)
_TARGET = flags.DEFINE_string("target", "tiny", "pair of the chi-square and greedy parts")
_DRAFTS = flags.DEFINE_list("drafts", ["tiny-dflash", "tiny-dflash2"], "its drafts")
_SEED = flags.DEFINE_integer("seed", 0, "weights of the toys and seeds of the samples")
_JSON = flags.DEFINE_string("json", None, "file for the same figures")


def show(console: rich.console.Console, checks: list[dict]) -> None:
    table = rich.table.Table("check", "draft", "setting", "result", "")
    for check in checks:
        setting = check.get("sampling", "greedy")
        if "vocabulary" in check:
            toy = "V {vocabulary}, K {draft_tokens}, {length} tokens".format(**check)
            setting = f"{toy}; {setting}"
        if "difference" in check:
            result = f"max difference {check['difference']:.1e}"
        elif "p" in check:
            result = "p {p:.3f}, corrected {corrected_p:.3f}, n {trials}".format(**check)
        else:
            result = f"{check['differing']} of {check['tokens']} tokens differ"
        verdict = "ok" if check["passed"] else "[bold red]FAILED"
        table.add_row(check["check"], check["draft"], setting, result, verdict)
    console.print(table)


def main() -> None:
    started = time.monotonic()
    short = _SHORT.value
    sizes, controls = ([(4, 2, 4)], CONTROLS[3:]) if short else (SIZES, CONTROLS)
    checks = certify_toys(sizes, controls, 16_384 if short else 65_536, _SEED.value)
    plain_pair = load_pair(_TARGET.value, None)
    prompts = held_out_prompts(plain_pair.tokenizer, 8, 96)
    drafts = _DRAFTS.value[-1:] if short else _DRAFTS.value
    pairs = {name: load_pair(_TARGET.value, name) for name in drafts}
    trials = 512 if short else 2048
    checks += at_once(
        *(partial(certify_samples, pair, name, prompts[0][:48], trials)
          for name, pair in pairs.items())
    )  # fmt: skip
    if not short:
        plain = generate(plain_pair, prompts, draft_tokens=0, max_new_tokens=96, ignore_eos=True)
        checks += at_once(
            *(partial(certify_greedy, pair, name, plain, prompts) for name, pair in pairs.items())
        )
    passed = correct_and_judge(checks)
    console = cli.table_console()
    show(console, checks)
    seconds = time.monotonic() - started
    console.print(
        f"{'PASSED' if passed else 'FAILED'}: {len(checks)} checks in {seconds:.0f} s; exact means "
        f"<= {EXACT:g}, p-values must stay above {SIGNIFICANCE:g} after correction.",
        highlight=False,
    )
    if _JSON.value:
        text = json.dumps({"passed": passed, "seconds": seconds, "checks": checks}, indent=2)
        pathlib.Path(_JSON.value).write_text(text + "\n", "utf-8")
    if not passed:
        sys.exit(1)


if __name__ == "__main__":
    cli.run(main)
