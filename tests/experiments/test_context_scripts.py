"""plan_memory, branch and context_figures as a user runs them."""

import json

import pytest


def test_plan_memory(script, capsys, geometries):
    run = script("plan_memory")
    pair = ["--target", geometries / "qwen3.5-27b.json"]
    pair += ["--draft", geometries / "qwen3.8-27b-dflash2.json", "--dtype", "bfloat16"]
    assert run(*pair, "--rows", 2, "--json") == 0
    parts = json.loads(capsys.readouterr().out)
    total = parts.pop("total")
    assert total == sum(parts.values()) and parts["rings"] == 2 * 40 * 2**20
    assert run(*pair, "--device_gib", 40, "--nojson", "--rows", 1) == 2
    captured = capsys.readouterr()
    assert "target_kv" in captured.out
    assert captured.err.startswith("error: the engine needs 55,503")
    assert run("--rows", 0) == 2
    assert "--rows: got 0" in capsys.readouterr().err


@pytest.fixture
def branch(script, pair_flags):
    run = script("branch")
    fixed = ["--target", pair_flags["target"], "--draft", pair_flags["dflash2"], "--rows", 2]
    return lambda *arguments: run(*fixed, "--max_context", 128, *arguments)


def test_branches_are_compared_and_saved(branch, tmp_path, capsys):
    """Seeds x temperatures x widths; a saved point gives the same branches."""
    kinds = ["--seeds", "1,2", "--temperatures", "0,0.9", "--max_new_tokens", 24, "--json"]
    point = ["--prompt", "def add", "--at", 8]
    assert branch(*point, *kinds, "--widths", "3,1", "--save", tmp_path / "point") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["temperature"], r["draft_tokens"], r["seed"]) for r in rows] == [
        (heat, width, seed) for heat in (0, 0.9) for width in (3, 1) for seed in (1, 2)
    ]
    greedy = [row for row in rows if row["temperature"] == 0]
    assert len({row["text"] for row in greedy}) == 1  # neither seed nor width matters
    assert all(row["prefilled"] == 0 and row["as_first"] >= 8 for row in rows)
    hot = [row["text"] for row in rows if row["temperature"] > 0]
    assert hot[0] != hot[1]


def test_a_saved_point_goes_on(script, pair_flags, tmp_path, capsys):
    fixed = ["--target", pair_flags["target"], "--draft", pair_flags["dflash2"]]
    fixed += ["--max_context", 128, "--max_new_tokens", 24, "--temperatures", 0.9, "--seeds", "1,2"]
    first = script("branch")
    saved = ["--prompt", "def add", "--at", 8, "--save", tmp_path / "point"]
    assert first(*fixed, *saved, "--json") == 0
    wanted = capsys.readouterr().out
    again = script("branch")
    assert again(*fixed, "--load", tmp_path / "point", "--json") == 0
    assert capsys.readouterr().out == wanted
    other = script("branch")
    fixed[3] = pair_flags["dflash"]
    assert other(*fixed, "--load", tmp_path / "point") == 2
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
