"""Requests and results as JSON lines: reading, checking, taking up where a run was stopped."""

import dataclasses
import json
import pathlib

from dflash_jax import Request, Sampling
from experiments import cli, show

_SAMPLING = tuple(field.name for field in dataclasses.fields(Sampling))
_OPTIONS = ("seed", "max_new_tokens", "min_new_tokens", "stop", "eos_ids", "ignore_eos")
_PROMPTS = ("prompt", "tokens")


def read_requests(path: str) -> dict[str, tuple[int, dict]]:
    """Requests by id: the number of their line and the arguments of `Engine.submit`.

    A line is an object with `id` (a string), either `prompt` (text) or `tokens` (ids), and any of
    Request's options and Sampling's fields by name.

    Raises:
      ValueError: a line that is none of that; the message names it.
    """
    found: dict[str, tuple[int, dict]] = {}
    for number, line in enumerate(cli.read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            key, arguments = _parse(line)
            if key in found:
                raise ValueError(f"id {key!r} was used in line {found[key][0]} already")
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        found[key] = number, arguments
    return found


def _parse(line: str) -> tuple[str, dict]:
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError(f"got {fields!r}, expected an object")
    unknown = sorted(set(fields) - {"id", *_PROMPTS, *_OPTIONS, *_SAMPLING})
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}")
    key = fields.get("id")
    if not isinstance(key, str) or not key:
        raise ValueError(f"id: got {key!r}, expected a non-empty string")
    if ("prompt" in fields) == ("tokens" in fields):
        raise ValueError("expected either prompt or tokens")
    text, ids = fields.get("prompt"), fields.get("tokens")
    if "prompt" in fields and not isinstance(text, str):
        raise ValueError(f"prompt: got {text!r}, expected a string")
    if "tokens" in fields and not (
        isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    ):
        raise ValueError(f"tokens: got {ids!r}, expected a list of token ids")
    arguments = {name: fields[name] for name in _OPTIONS if name in fields}
    sampling = Sampling(**{name: fields[name] for name in _SAMPLING if name in fields})
    return key, {"prompt": ids if text is None else text, "sampling": sampling, **arguments}


def open_results(path: str) -> set[str]:
    """Ids that a results file already has; makes an empty one where there is none.

    A last line that was torn when a run was stopped is cut off.

    Raises:
      ValueError: any other line that is not a result; the message names it.
    """
    file = pathlib.Path(path)
    if not file.exists():
        file.touch()
        return set()
    raw = file.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    done = set()
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            done.add(json.loads(line)["id"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: not a result of this script") from error
    if len(whole) < len(raw):
        with file.open("r+b") as opened:
            opened.truncate(len(whole))
    return done


def as_result(key: str, request: Request) -> dict:
    """What the results file says of one request."""
    figures = dataclasses.asdict(request.statistics)
    return {
        "id": key,
        "text": request.text,
        "tokens": request.tokens,
        "finish_reason": request.finish_reason,
        "error": None if request.error is None else repr(request.error),
        "seed": int(request.seed),
        "prompt_tokens": len(request.prompt),
        "statistics": show.without_nan(figures),
    }
