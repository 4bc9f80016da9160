"""What `make demo` shows: text being drafted and verified, then the comparison.

    python -m experiments.demo
"""

import rich.console
from absl import flags

from dflash_jax import generate, load_pair
from experiments import cli, measure, show
from experiments.prompts import held_out_prompts

_PROMPTS = flags.DEFINE_integer("prompts", 8, "held-out prompts in the table, 1..64")
_SHOWN = flags.DEFINE_integer("shown", 3, "prompts whose text is shown")
_MAX_NEW = flags.DEFINE_integer("max_new_tokens", 128, "tokens generated per prompt")
_PROMPT_TOKENS = 64


def main() -> None:
    console = rich.console.Console()
    pair = load_pair("tiny", "tiny-dflash2")
    console.print(f"tiny: {pair.describe()}", style="bold", highlight=False)
    console.print(show.legend())
    prompts = held_out_prompts(pair.tokenizer, _PROMPTS.value, _PROMPT_TOKENS)
    for prompt in prompts[: _SHOWN.value]:
        (result,) = generate(pair, prompt, max_new_tokens=_MAX_NEW.value)
        console.rule()
        console.print(show.coloured(pair.tokenizer, pair.tokenizer.decode(prompt), result))
        console.print(show.summary(result), style="dim", highlight=False)
    console.rule()
    for temperature in (0.0, 1.0):
        figures = measure.compare(
            target="tiny",
            drafts=["tiny-dflash", "tiny-dflash2"],
            prompts=prompts,
            rows=1,
            draft_tokens=pair.draft.block_size - 1,
            max_new_tokens=_MAX_NEW.value,
            temperature=temperature,
            seed=0,
            dtype="float32",
        )
        show.print_comparison(console, figures)


if __name__ == "__main__":
    cli.run(main)
