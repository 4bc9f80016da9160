"""How results look on a terminal: tokens coloured by origin, and the comparison table."""

import dataclasses
import math

import rich.table
import rich.text

from dflash_jax import Generation, Origin
from dflash_jax.io.tokenizer import Tokenizer

STYLES = {
    Origin.PROMPT: "bold magenta",
    Origin.DRAFT: "green",
    Origin.CORRECTION: "red",
    Origin.BONUS: "cyan",
    Origin.PLAIN: "white",
}


def legend() -> rich.text.Text:
    """One line that names the colours."""
    meaning = {
        Origin.PROMPT: "chosen by the prefill",
        Origin.DRAFT: "accepted draft",
        Origin.CORRECTION: "correction",
        Origin.BONUS: "bonus",
        Origin.PLAIN: "plain step",
    }
    line = rich.text.Text()
    for origin, words in meaning.items():
        line.append(f"■ {words}  ", STYLES[origin])
    return line


def coloured(tokenizer: Tokenizer, prompt: str, generation: Generation) -> rich.text.Text:
    """Prompt in grey, then each token in the colour of its origin.

    A character whose bytes are split over tokens takes the colour of the token that completes it.
    """
    line = rich.text.Text(prompt, style="dim")
    pending: list[int] = []
    for token, origin in zip(generation.tokens, generation.origins, strict=True):
        pending.append(token)
        piece = tokenizer.decode(pending)
        if piece.endswith("\ufffd"):
            continue
        line.append(piece, STYLES[origin])
        pending = []
    return line


def summary(generation: Generation) -> str:
    """What happened, in one line: effective width, rounds, acceptance."""
    return (
        f"{len(generation.tokens)} tokens in {len(generation.rounds)} rounds, "
        f"{generation.draft_tokens} draft tokens, tau {generation.acceptance_length:.2f}, "
        f"finished by {generation.finish_reason}"
    )


def as_json(prompt: str, generation: Generation) -> dict:
    """Everything a generation says of itself; tau is null where no round had proposals."""
    length = generation.acceptance_length
    return {
        "prompt": prompt,
        "text": generation.text,
        "tokens": generation.tokens,
        "origins": [origin.value for origin in generation.origins],
        "finish_reason": generation.finish_reason,
        "draft_tokens": generation.draft_tokens,
        "block_attention": generation.block_attention,
        "acceptance_length": None if math.isnan(length) else length,
        "rounds": [dataclasses.asdict(r) for r in generation.rounds],
    }


def without_nan(value):
    """The same figures with None for every NaN, at any depth: JSON has no other word for it."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def table(rows: list[dict], draft_tokens: int, title: str) -> rich.table.Table:
    """The comparison: one row per setting, as `measure.measure` returns them."""
    view = rich.table.Table(title=title)
    accepted = f"% accepted ≥ 1..{draft_tokens}"
    for name in ("", "tokens/s", "× plain", "rounds", "τ", "95 %", accepted):
        view.add_column(name, justify="left" if not name else "right")
    plain = next((row["tokens_per_second"] for row in rows if not row["draft_tokens"]), None)
    for row in rows:
        low, high = row["acceptance_interval"]
        shares = " ".join(f"{100 * share:.0f}" for share in row["accepted_per_position"])
        view.add_row(
            row["name"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['tokens_per_second'] / plain:.2f}" if plain else "",
            str(row["rounds"]),
            f"{row['acceptance_length']:.2f}" if row["draft_tokens"] else "",
            f"{low:.2f}–{high:.2f}" if row["draft_tokens"] else "",
            shares,
        )
    return view


def print_comparison(console, figures: dict) -> None:
    """The table of `measure.compare`, and one line of costs per draft."""
    title = (
        f"{figures['prompts']} prompts x {figures['max_new_tokens']} tokens, "
        f"T = {figures['temperature']:g}, K = {figures['draft_tokens']}, B = {figures['rows']}, "
        f"{figures['dtype']}"
    )
    console.print(table(figures["settings"], figures["draft_tokens"], title))
    for row in figures["settings"][1:]:
        line = (
            f"{row['name']}: verify costs {row['c_v']:.2f} plain steps, draft {row['c_d']:.2f}; "
            f"the cost model gives {row['model_tokens_per_second']:.0f} tokens/s, "
            f"measured {100 * row['model_share']:.0f} % of it"
        )
        if "rows_equal_to_plain" in row:
            line += f"; {row['rows_equal_to_plain']} of {row['prompts']} texts equal plain decoding"
        console.print(line, highlight=False)
