"""What every script shares: one line for a mistake, and an exit code that says so."""

import dataclasses
import sys
from collections.abc import Callable

from absl import app, flags, logging

from dflash_jax import Sampling


def run(main: Callable[[], None]) -> None:
    """Parses flags and runs `main`.

    What a user can get wrong raises ValueError or OSError with a message meant for them: it is
    printed as one line and the exit code is 2. With `-v 1` the traceback is shown too.
    """

    def guarded(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
        try:
            main()
        except (ValueError, OSError) as error:
            if logging.vlog_is_on(1):
                raise
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)

    app.run(guarded)


def define_sampling() -> Callable[[], Sampling]:
    """Defines one flag per field of `Sampling`; call the result after parsing."""
    texts = {
        "temperature": "0 is greedy",
        "top_k": "keep the k best tokens; 0 keeps all",
        "top_p": "keep tokens while the mass before them is below this",
        "min_p": "keep tokens with this share of the best one's mass",
        "presence_penalty": "subtracted from the logit of every token published so far",
        "frequency_penalty": "subtracted once for each time it was published",
        "repetition_penalty": "divides positive logits of tokens of prompt and output; 1 is none",
    }
    held = {}
    for field in dataclasses.fields(Sampling):
        whole = isinstance(field.default, int)
        define = flags.DEFINE_integer if whole else flags.DEFINE_float
        held[field.name] = define(field.name, field.default, texts[field.name])
    return lambda: Sampling(**{name: flag.value for name, flag in held.items()})
