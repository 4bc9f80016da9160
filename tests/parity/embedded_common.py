"""What the two `embedded_*` scripts share: reading cases, comparing, and saying where it differs.

A cases file is a JSON list, one entry per prompt:

    {"prompt": [ids], "tokens": [generated ids],
     "dflash": {"accepted": [A per round]}, "dflash2": {"accepted": [A per round]},
     "max_new_tokens": 64, "draft_tokens": 7}         the last two are optional

`python -m experiments.export_cases` writes one with this project's own greedy decoding.
"""

import dataclasses
import json
import pathlib
import time

import torch
from transformers import Qwen3_5ForCausalLM


@dataclasses.dataclass(frozen=True)
class Difference:
    """First difference of one prompt. `gap`: the reference's best minus second-best score there."""

    prompt: int
    what: str
    position: int
    ours: int | None
    reference: int | None
    gap: float | None

    def __str__(self):
        gap = "" if self.gap is None else f"; top two scores of the reference {self.gap:.2e} apart"
        return (
            f"prompt {self.prompt}: {self.what} {self.position}: "
            f"ours {self.ours}, reference {self.reference}{gap}"
        )


def load_cases(path: str, count: int) -> list[dict]:
    """The first `count` cases; fewer in the file is an error."""
    cases = json.loads(pathlib.Path(path).read_text())
    if len(cases) < count:
        raise ValueError(f"{path}: {len(cases)} cases, but --prompts asks for {count}")
    return cases[:count]


def load_target(directory: pathlib.Path):
    """The target as transformers' Qwen3.5 class, float32, one thread."""
    torch.set_num_threads(1)
    return Qwen3_5ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def first_difference(prompt, what, ours, reference, gaps) -> Difference | None:
    """Compares two lists; a missing element at the end counts as a difference."""
    for i in range(max(len(ours), len(reference))):
        a = ours[i] if i < len(ours) else None
        b = reference[i] if i < len(reference) else None
        if a != b:
            return Difference(prompt, what, i, a, b, gaps[i] if i < len(gaps) else None)
    return None


class Report:
    """Prints a line per difference, ends with a summary and, if asked for, a JSON file."""

    def __init__(self, name: str):
        self.name, self.differences, self.start = name, [], time.perf_counter()
        self.summary: dict = {"check": name, "prompts": 0, "tokens": 0}

    def add(self, difference: Difference | None) -> None:
        if difference is not None:
            self.differences.append(difference)
            print(f"{self.name}: {difference}", flush=True)

    def count(self, tokens: int, rounds: int = 0, accepted: int = 0) -> None:
        self.summary["prompts"] += 1
        self.summary["tokens"] += tokens
        if rounds:
            self.summary["rounds"] = self.summary.get("rounds", 0) + rounds
            self.summary["accepted"] = self.summary.get("accepted", 0) + accepted

    def finish(self) -> dict:
        """The summary; also printed."""
        self.summary["differences"] = [dataclasses.asdict(d) for d in self.differences]
        self.summary["seconds"] = round(time.perf_counter() - self.start, 1)
        s = self.summary
        rounds = f", {s['rounds']} rounds, {s['accepted']} accepted" if "rounds" in s else ""
        print(
            f"{self.name}: {s['prompts']} prompts, {s['tokens']} tokens{rounds}, "
            f"{len(self.differences)} differences, {s['seconds']} s",
            flush=True,
        )
        return s


def write_json(path: str | None, summaries: list[dict]) -> None:
    """Writes the summaries if a path is given."""
    if path:
        pathlib.Path(path).write_text(json.dumps(summaries, indent=1) + "\n")
