"""Writes the held-out prompts, `experiments/heldout.json`, from the running interpreter's library.

    python -m experiments.make_prompts
"""

import json
import pathlib

from absl import flags

from experiments import cli, prompts

_OUTPUT = flags.DEFINE_string("output", str(prompts.FILE), "JSON file to write")
_COUNT = flags.DEFINE_integer("count", 64, "prompts", lower_bound=1)


def main() -> None:
    entries = prompts.choose(_COUNT.value)
    text = json.dumps(entries, indent=1)
    pathlib.Path(_OUTPUT.value).write_text(text + "\n", encoding="utf-8")
    print(f"wrote {len(entries)} prompts to {_OUTPUT.value}")


if __name__ == "__main__":
    cli.run(main)
