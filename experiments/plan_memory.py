"""What an engine of these models and widths takes on the device, before it is built.

    python -m experiments.plan_memory --target tiny --draft tiny-dflash2 --rows 8
    python -m experiments.plan_memory --target qwen/ --draft dflash2/ --rows 4 --device_gib 80

Only config.json is read, from a directory or as a file: nothing is loaded or computed. The
workspace is an estimate; all else is what an engine allocates, to the byte.
"""

import dataclasses
import json
import pathlib

import rich.table
from absl import flags

from dflash_jax import Pair
from dflash_jax.config import check_pair, parse_draft_config, parse_target_config
from dflash_jax.decoding.generate import plan
from dflash_jax.decoding.loop import PREFILL_CHUNK
from dflash_jax.io.pair import resolve
from dflash_jax.io.tensors import abstract_params
from dflash_jax.precision import compute_dtype
from dflash_jax.sessions.memory import memory_plan
from dflash_jax.state.sequence import PAGE_SIZE
from experiments import cli

_TARGET = flags.DEFINE_string("target", "tiny", "embedded name, directory or config file")
_DRAFT = flags.DEFINE_string("draft", "tiny-dflash2", "likewise; 'none' is plain decoding")
_DTYPE = flags.DEFINE_string("dtype", "float32", "float32 or bfloat16")
_DRAFT_TOKENS = flags.DEFINE_integer("draft_tokens", None, "K; the trained block less one")
_ROWS = flags.DEFINE_integer("rows", 1, "requests that run at the same time, 1..8")
_CONTEXT = flags.DEFINE_integer("max_context", 4096, "tokens of prompt and output per row")
_POOL = flags.DEFINE_integer("pool_tokens", None, "positions of all pages; rows x max_context")
_PAGE = flags.DEFINE_integer("page_size", PAGE_SIZE, "positions of a page")
_CHUNK = flags.DEFINE_integer("prefill_chunk", PREFILL_CHUNK, "prompt tokens per step")
_DEVICE = flags.DEFINE_float("device_gib", None, "refuse a plan that takes more than this")
_JSON = flags.DEFINE_bool("json", False, "bytes as one JSON object")


def config_of(name: str) -> pathlib.Path:
    """A config file, or the directory that has one."""
    path = pathlib.Path(name)
    return path if path.is_file() else resolve(name)


def main() -> None:
    for flag in (_ROWS, _CONTEXT, _PAGE, _CHUNK):
        if flag.value < 1:
            raise ValueError(f"--{flag.name}: got {flag.value}, expected at least 1")
    dtype = compute_dtype(_DTYPE.value)
    target = parse_target_config(config_of(_TARGET.value))
    draft = draft_params = None
    if _DRAFT.value != "none":
        draft = parse_draft_config(config_of(_DRAFT.value))
        check_pair(target, draft, None)
        draft_params = abstract_params(draft, dtype)
    pair = Pair(target, abstract_params(target, dtype), draft, draft_params, None, _DTYPE.value)
    spec, weights = plan(pair, _DRAFT_TOKENS.value)
    positions = _ROWS.value * _CONTEXT.value if _POOL.value is None else _POOL.value
    planned = memory_plan(
        spec,
        weights,
        rows=_ROWS.value,
        max_context=_CONTEXT.value,
        prefill_chunk=_CHUNK.value,
        page_size=_PAGE.value,
        pages=-(-positions // _PAGE.value),
    )
    parts = dataclasses.asdict(planned) | {"total": planned.total}
    if _JSON.value:
        print(json.dumps(parts))
    else:
        table = rich.table.Table("", "MiB", title=f"{_TARGET.value} with {_DRAFT.value}")
        table.columns[1].justify = "right"
        for name, size in parts.items():
            table.add_row(name, f"{size / 2**20:,.1f}", end_section=name == "workspace")
        cli.table_console().print(table)
    if _DEVICE.value is not None:
        planned.check(int(_DEVICE.value * 2**30))


if __name__ == "__main__":
    cli.run(main)
