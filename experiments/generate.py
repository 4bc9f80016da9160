"""Generates text from a prompt or a file of prompts.

    python -m experiments.generate --prompt "def main():" --max_new_tokens 64
    python -m experiments.generate --prompt_file prompts.txt --rows 4 --temperature 0.8 --json
"""

import json

import rich.console
from absl import flags

from dflash_jax import Sampling, generate, load_pair
from dflash_jax.decoding.generate import plan
from experiments import cli, show

_PROMPT = flags.DEFINE_string("prompt", None, "text to continue")
_PROMPT_FILE = flags.DEFINE_string("prompt_file", None, "file with one prompt a line")
_TARGET = flags.DEFINE_string("target", "tiny", "embedded name or Hugging Face directory")
_DRAFT = flags.DEFINE_string("draft", "tiny-dflash2", "likewise; 'none' is plain decoding")
_HEAD = flags.DEFINE_string(
    "proposal_head", None, "file of an indexed proposal head; 'beside' is the draft's own"
)
_DRAFT_TOKENS = flags.DEFINE_integer(
    "draft_tokens", None, "proposals per round, 0..15; the trained block less one by default"
)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy")
_TOP_K = flags.DEFINE_integer("top_k", 0, "keep the k best tokens; 0 keeps all")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "keep tokens while the mass before them is below this")
_MIN_P = flags.DEFINE_float("min_p", 0.0, "keep tokens with this share of the best one's mass")
_PRESENCE = flags.DEFINE_float(
    "presence_penalty", 0.0, "subtracted from the logit of every token published so far"
)
_FREQUENCY = flags.DEFINE_float(
    "frequency_penalty", 0.0, "subtracted once for each time it was published"
)
_REPETITION = flags.DEFINE_float(
    "repetition_penalty", 1.0, "divides positive logits of tokens of prompt and output"
)
_SEED = flags.DEFINE_integer("seed", 0, "row i has seed + i")
_MAX_NEW = flags.DEFINE_integer("max_new_tokens", 128, "tokens to generate per prompt")
_MIN_NEW = flags.DEFINE_integer("min_new_tokens", 0, "tokens before a stop token may come")
_DTYPE = flags.DEFINE_string("dtype", "float32", "float32 or bfloat16")
_CONTEXT_DTYPE = flags.DEFINE_string(
    "context_dtype", None, "of the draft's context K/V, where not --dtype"
)
_ROWS = flags.DEFINE_integer("rows", 1, "prompts decoded together, 1..8")
_JSON = flags.DEFINE_bool("json", False, "one JSON object per prompt instead of colours")


def read_prompts() -> list[str]:
    """The prompt, or the lines of the prompt file."""
    if (_PROMPT.value is None) == (_PROMPT_FILE.value is None):
        raise ValueError("give either --prompt or --prompt_file")
    if _PROMPT.value is not None:
        return [_PROMPT.value]
    lines = cli.read_text(_PROMPT_FILE.value).splitlines()
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"{_PROMPT_FILE.value}: no prompt in it")
    return prompts


def main() -> None:
    if not 1 <= _ROWS.value <= 8:
        raise ValueError(f"--rows: got {_ROWS.value}, expected 1..8")
    sampling = Sampling(
        _TEMPERATURE.value,
        _TOP_K.value,
        _TOP_P.value,
        _MIN_P.value,
        _PRESENCE.value,
        _FREQUENCY.value,
        _REPETITION.value,
    )
    prompts = read_prompts()
    draft = None if _DRAFT.value == "none" else _DRAFT.value
    pair = load_pair(
        _TARGET.value,
        draft,
        _DTYPE.value,
        proposal_head=_HEAD.value,
        context_dtype=_CONTEXT_DTYPE.value,
    )
    console = rich.console.Console()
    if not _JSON.value:
        spec, _ = plan(pair, _DRAFT_TOKENS.value)
        title = f"{_TARGET.value}: {pair.describe()}, {spec.draft_tokens} draft tokens"
        console.print(title, style="bold", highlight=False, soft_wrap=True)
        console.print(show.legend())
    for start in range(0, len(prompts), _ROWS.value):
        batch = prompts[start : start + _ROWS.value]
        results = generate(
            pair,
            batch,
            draft_tokens=_DRAFT_TOKENS.value,
            max_new_tokens=_MAX_NEW.value,
            min_new_tokens=_MIN_NEW.value,
            sampling=sampling,
            seed=_SEED.value + start,
        )
        for prompt, result in zip(batch, results, strict=True):
            if _JSON.value:
                print(json.dumps(show.as_json(prompt, result)))
                continue
            # Soft: a file gets the text as it is, without line breaks of the console's.
            console.print(show.coloured(pair.tokenizer, prompt, result), soft_wrap=True)
            console.print(show.summary(result), style="dim", highlight=False)


if __name__ == "__main__":
    cli.run(main)
