"""Serves a file of requests through the batch engine; results in order of completion.

    python -m experiments.serve_file --input requests.jsonl --output results.jsonl --rows 4

A request is one line: {"id": "a", "prompt": "def main():", "max_new_tokens": 40, "stop": ["class"],
"temperature": 0.8, "seed": 1}; `tokens` instead of `prompt` are token ids. A stopped run goes on
where it was: requests whose id the output has are left out.
"""

import json

import rich.console
import rich.progress
from absl import flags

from dflash_jax import Engine, load_pair
from experiments import cli
from experiments.requests_file import as_result, open_results, read_requests

_INPUT = flags.DEFINE_string("input", None, "JSON lines of requests", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "JSON lines of results; appended to", required=True)
_TARGET = flags.DEFINE_string("target", "tiny", "embedded name or Hugging Face directory")
_DRAFT = flags.DEFINE_string("draft", "tiny-dflash2", "likewise; 'none' is plain decoding")
_DRAFT_TOKENS = flags.DEFINE_integer(
    "draft_tokens", None, "proposals per round, 0..15; the trained block less one by default"
)
_DTYPE = flags.DEFINE_string("dtype", "float32", "float32 or bfloat16")
_CONTEXT_DTYPE = flags.DEFINE_string(
    "context_dtype", None, "of the draft's context K/V, where not --dtype"
)
_ROWS = flags.DEFINE_integer("rows", 4, "requests that run together, 1..8")
_CONTEXT = flags.DEFINE_integer("max_context", 1024, "tokens of prompt and output per request")
_CACHE = flags.DEFINE_string("compilation_cache", None, "directory of compiled programs to keep")


def main() -> None:
    requests = read_requests(_INPUT.value)
    done = open_results(_OUTPUT.value)
    left = {key: request for key, request in requests.items() if key not in done}
    console = rich.console.Console(stderr=True)
    if not left:
        console.print(f"all {len(requests)} requests are in {_OUTPUT.value}", highlight=False)
        return
    draft = None if _DRAFT.value == "none" else _DRAFT.value
    pair = load_pair(_TARGET.value, draft, _DTYPE.value, context_dtype=_CONTEXT_DTYPE.value)
    with rich.progress.Progress(console=console) as progress:
        engine = make_engine(pair, progress)
        console.print(engine.describe(), style="bold", highlight=False, soft_wrap=True)
        keys = {}
        for key, (number, arguments) in left.items():
            try:
                keys[engine.submit(**arguments)] = key
            except ValueError as error:
                raise ValueError(f"{_INPUT.value}, line {number}: {error}") from error
        before = len(requests) - len(left)
        task = progress.add_task("requests", total=len(requests), completed=before)
        failed = 0
        with open(_OUTPUT.value, "a", encoding="utf-8") as output:
            while not engine.idle:
                for request in engine.step():
                    # A whole line at a time, out of our hands at once: a stop may tear the last.
                    output.write(json.dumps(as_result(keys[request], request)) + "\n")
                    output.flush()
                    failed += request.finish_reason == "error"
                    progress.advance(task)
    if failed:
        raise ValueError(f"{failed} of {len(left)} requests ended in an error: see {_OUTPUT.value}")


def make_engine(pair, progress: rich.progress.Progress) -> Engine:
    """The engine, its compilations shown as they come."""
    task = progress.add_task("compiling", total=None)

    def report(program, seconds, done, total):
        progress.update(
            task, total=total, completed=done, description=f"compiled {program} ({seconds:.1f} s)"
        )

    return Engine(
        pair,
        max_rows=_ROWS.value,
        draft_tokens=_DRAFT_TOKENS.value,
        max_context=_CONTEXT.value,
        compilation_cache=_CACHE.value,
        report=report,
    )


if __name__ == "__main__":
    cli.run(main)
