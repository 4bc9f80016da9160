"""plan_memory, branch and context_figures as a user runs them."""

import json

import pytest


def test_plan_memory(script, capsys, geometries):
    run = script("plan_memory")
    pair = ["--target", geometries / "qwen3.5-27b.json"]
    pair += ["--draft", geometries / "qwen3.8-27b-dflash2.json", "--dtype", "bfloat16"]
    assert run(*pair, "--rows", 2, "--json", "--device_gib", 40) == 2
    captured = capsys.readouterr()
    parts = json.loads(captured.out)
    total = parts.pop("total")
    assert total == sum(parts.values()) and parts["rings"] == 2 * 40 * 2**20
    assert captured.err.startswith(f"error: the engine needs {total / 2**20:,.1f} MiB, the device")
    assert run("--rows", 0) == 2
    assert "--rows: got 0" in capsys.readouterr().err


@pytest.fixture
def branch(script, pair_flags):
    run = script("branch")
    fixed = ["--target", pair_flags["target"], "--draft", pair_flags["dflash2"], "--rows", 2]
    return lambda *arguments: run(*fixed, "--max_context", 128, *arguments)


def test_branches_are_compared_saved_and_gone_on_with(branch, script, pair_flags, tmp_path, capsys):
    """Seeds x temperatures x widths; a saved point gives the same branches, to the same pair."""
    kinds = ["--seeds", "1,2", "--temperatures", "0,0.9", "--max_new_tokens", 24, "--json"]
    kinds += ["--widths", "3,1"]
    point = ["--prompt", "def add", "--at", 8, "--save", tmp_path / "point"]
    assert branch(*point, *kinds) == 0
    written = capsys.readouterr().out
    rows = [json.loads(line) for line in written.splitlines()]
    assert [(r["temperature"], r["draft_tokens"], r["seed"]) for r in rows] == [
        (heat, width, seed) for heat in (0, 0.9) for width in (3, 1) for seed in (1, 2)
    ]
    greedy = [row for row in rows if row["temperature"] == 0]
    assert len({row["text"] for row in greedy}) == 1  # neither seed nor width matters
    assert all(row["prefilled"] == 0 and row["as_first"] >= 8 for row in rows)
    hot = [row["text"] for row in rows if row["temperature"] > 0]
    assert hot[0] != hot[1]
    pair = ["--target", pair_flags["target"], "--rows", 2, "--max_context", 128]
    again = ["--load", tmp_path / "point", *pair, *kinds]
    assert script("branch")("--draft", pair_flags["dflash2"], *again) == 0
    assert capsys.readouterr().out == written
    assert script("branch")("--draft", "none", *again) == 2
    assert "draft: the checkpoint is of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --prompt or --load"),
        (["--prompt", "a", "--at", 64], "--at: got 64, expected 1..63"),
        (
            ["--prompt", "a", "--at", 2, "--seeds", "1,b"],
            "--seeds: got 1,b, expected a list of int",
        ),
        (["--load", "/nowhere"], "/nowhere: expected a saved checkpoint, found none"),
    ],
)
def test_mistakes_of_branch(branch, capsys, arguments, message):
    assert branch(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_context_figures(script, pair_flags, capsys):
    run = script("context_figures")
    fixed = ["--target", pair_flags["target"], "--draft", pair_flags["dflash"]]
    assert run(*fixed, "--tokens", 200, "--repeats", 2, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["checkpoint: pages taken"] == 0
    page = figures["fork: bytes of pages shared"] / (200 // 64)
    assert figures["fork: bytes of pages of its own"] == page * (-(-248 // 64) - 200 // 64)
    assert figures["save MB/s"] > 0 and figures["load MB/s"] > 0
    assert run("--tokens", 0) == 2
