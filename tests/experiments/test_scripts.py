"""The scripts from their command lines: what they print, write and say about mistakes."""

import ast
import json
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from dflash_jax import Sampling, load_pair
from dflash_jax.training import corpus
from experiments.configs import tiny

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = ("branch", "build_proposal_head", "certify", "compare", "compile_round",
           "context_figures", "demo", "device_check", "export_cases", "generate",
           "kernel_report", "make_prompts", "plan_memory", "profile_round", "serve_file",
           "train_draft", "train_target")  # fmt: skip


def objects(text: str) -> list[dict]:
    """JSON lines; anything else on stdout would fail here."""
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def check_counts(row: dict, new_tokens: int) -> None:
    """The parts of one `--json` object add up."""
    rounds = row["rounds"]
    assert len(row["tokens"]) == len(row["origins"]) <= new_tokens
    assert 1 + sum(r["committed"] for r in rounds) == len(row["tokens"])
    for r in rounds:
        assert 0 <= r["accepted"] <= r["verified"] <= r["proposed"] <= row["draft_tokens"]
        assert 1 <= r["committed"] <= r["accepted"] + 1
    assert row["origins"].count("prompt") == 1
    taken = [r["accepted"] + 1 for r in rounds if r["verified"]]
    if taken:
        assert row["acceptance_length"] == pytest.approx(np.mean(taken))
        assert len(rounds) < len(row["tokens"])
    else:
        assert row["acceptance_length"] is None


# --- generate ---


@pytest.mark.slow
def test_generate_prints_one_object_a_prompt(script, pair_flags, tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("def main():\n\nclass Ring:\n    self.slots\n")
    run = script("generate")
    flags = [f"--target={pair_flags['target']}", "--max_new_tokens=20", "--json"]
    texts = {}
    for draft, rows in ((pair_flags["dflash2"], 2), (pair_flags["dflash"], 1), ("none", 1)):
        assert run(*flags, f"--draft={draft}", f"--prompt_file={file}", f"--rows={rows}") == 0
        printed = objects(capsys.readouterr().out)
        assert [row["prompt"] for row in printed] == ["def main():", "class Ring:",
                                                      "    self.slots"]  # fmt: skip
        for row in printed:
            check_counts(row, 20)
            plain = draft == "none"
            assert row["draft_tokens"] == (0 if plain else 7)
            assert (row["block_attention"] is None) == plain
            assert row["finish_reason"] in ("stop", "length")
            assert (len(row["tokens"]) == 20) or row["finish_reason"] == "stop"
        texts[draft] = [(row["tokens"], row["text"]) for row in printed]
    # Greedy text does not depend on the draft nor on the batch.
    assert texts[pair_flags["dflash2"]] == texts[pair_flags["dflash"]] == texts["none"]


@pytest.mark.slow
def test_generate_shows_text_and_settings(script, pair_flags, capsys):
    run = script("generate")
    flags = [f"--target={pair_flags['target']}", f"--draft={pair_flags['dflash2']}"]
    assert run(*flags, "--prompt=def main():", "--max_new_tokens=9", "--draft_tokens=3") == 0
    printed = capsys.readouterr().out
    assert "DFlash2, trained block 8" in printed.splitlines()[0]
    assert printed.splitlines()[0].endswith("3 draft tokens")
    assert "\ndef main():" in printed
    assert re.search(r"\d+ tokens in \d+ rounds, 3 draft tokens, tau \d\.\d\d", printed)


# --- mistakes ---


def assert_one_line(captured, *fragments):
    """One line for the user on stderr and nothing on stdout."""
    (line,) = [line for line in captured.err.splitlines() if line.strip()]
    assert line.startswith("error: ")
    for fragment in fragments:
        assert fragment in line
    assert not captured.out


P = "--prompt=def"
MISTAKES = {
    "no prompt": ([], ["give either --prompt or --prompt_file"]),
    "two prompts": ([P, "--prompt_file=x"], ["give either --prompt or --prompt_file"]),
    "empty prompt": (["--prompt="], ["prompt 0 is empty"]),
    "no such target": ([P, "--target=nowhere"], ["nowhere", "neither a directory nor"]),
    "no such draft": ([P, "--draft=nowhere"], ["nowhere", "neither a directory nor"]),
    "wide": ([P, "--draft_tokens=16"], ["draft_tokens", "got 16", "1..15"]),
    "negative width": ([P, "--draft_tokens=-1"], ["draft_tokens", "got -1", "1..15"]),
    "width without draft": ([P, "--draft=none", "--draft_tokens=3"], ["got 3", "without a draft"]),
    "cold": ([P, "--temperature=-1"], ["temperature", "got -1", ">= 0"]),
    "hot": ([P, "--temperature=inf"], ["temperature", "got inf"]),
    "nothing to do": ([P, "--max_new_tokens=0"], ["max_new_tokens", "got 0", "at least 1"]),
    "no rows": ([P, "--rows=0"], ["--rows", "got 0", "1..8"]),
    "nine rows": ([P, "--rows=9"], ["--rows", "got 9", "1..8"]),
    "dtype": ([P, "--dtype=float8"], ["float8", "float32", "bfloat16"]),
}


@pytest.fixture
def mistaken(script, pair_flags, capsys):
    """`(*arguments) -> captured` of a generate that must fail with exit code 2."""

    def run(*arguments):
        flags = [f"--target={pair_flags['target']}", f"--draft={pair_flags['dflash2']}"]
        assert script("generate")(*flags, "--json", *arguments) == 2
        return capsys.readouterr()

    return run


@pytest.mark.parametrize(("arguments", "fragments"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_line(mistaken, arguments, fragments):
    assert_one_line(mistaken(*arguments), *fragments)


def test_bad_prompt_files(mistaken, tmp_path):
    missing = tmp_path / "missing.txt"
    assert_one_line(mistaken(f"--prompt_file={missing}"), str(missing))
    assert_one_line(mistaken(f"--prompt_file={tmp_path}"), str(tmp_path))
    blank = tmp_path / "blank.txt"
    blank.write_text("\n  \n")
    assert_one_line(mistaken(f"--prompt_file={blank}"), str(blank), "no prompt in it")
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"def\xff\xfe")
    assert_one_line(mistaken(f"--prompt_file={binary}"), str(binary), "UTF-8")


def test_a_draft_for_another_target(mistaken, pair_flags, tmp_path):
    shutil.copytree(pair_flags["dflash2"], tmp_path / "draft")
    path = tmp_path / "draft" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"hidden_size": 96}))
    assert_one_line(mistaken(P, f"--draft={path.parent}"), "hidden_size", "96", "32")
    (path.parent / "config.json").write_text(json.dumps(config | {"num_target_layers": 24}))
    assert_one_line(mistaken(P, f"--draft={path.parent}"), "num_target_layers", "24", "2")
    # Draft and target the wrong way round, and a directory that is no checkpoint.
    assert_one_line(mistaken(P, f"--draft={pair_flags['target']}"), "architectures")
    assert_one_line(mistaken(P, f"--draft={tmp_path}"), str(tmp_path), "config.json")


def test_text_for_a_target_without_a_tokenizer(mistaken, script, capsys, fixtures_dir):
    bare = f"--target={fixtures_dir / 'dense_text'}"
    assert_one_line(mistaken(P, bare, "--draft=none"), "no tokenizer.json")
    assert script("compare")(bare) == 2
    assert_one_line(capsys.readouterr(), "no tokenizer.json")


def test_mistakes_of_compare(script, pair_flags, capsys):
    run = script("compare")
    target = f"--target={pair_flags['target']}"
    for flag, fragments in (
        ("--draft_tokens=0", ["--draft_tokens", "got 0", "1..15"]),
        ("--draft_tokens=16", ["--draft_tokens", "got 16", "1..15"]),
        ("--rows=9", ["--rows", "got 9", "1..8"]),
        ("--prompts=65", ["prompts", "got 65", "1..64"]),
        ("--prompt_tokens=0", ["prompt tokens", "got 0"]),
        ("--drafts=nowhere", ["nowhere"]),
    ):
        assert run(target, flag) == 2
        assert_one_line(capsys.readouterr(), *fragments)
        run = script("compare")  # flags at their defaults again


@pytest.mark.parametrize("name", ["generate", "train_target"])
def test_unknown_and_malformed_flags(script, capsys, name):
    required = ["--workdir=nowhere"] if name == "train_target" else []
    for argument in ("--no_such_flag=1", "--seed=many", "stray"):
        assert script(name)(*required, argument) != 0
        captured = capsys.readouterr()
        assert argument.lstrip("-").split("=")[0] in captured.err + captured.out
        assert "Traceback" not in captured.err


def in_a_process(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_a_failure_as_a_user_sees_it(tmp_path):
    done = in_a_process("experiments.generate", "--prompt=x", f"--target={tmp_path}")
    assert done.returncode == 2
    assert not done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and str(tmp_path) in lines[0]
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_embedded_pair_as_a_user_runs_it():
    """No flag but the prompt: the trained pair, greedy, seven proposals, and it does draft."""
    done = in_a_process(
        "experiments.generate", "--prompt=def main():", "--max_new_tokens=48", "--json"
    )
    assert done.returncode == 0, done.stderr
    (row,) = objects(done.stdout)
    check_counts(row, 48)
    assert row["draft_tokens"] == 7 and row["block_attention"] == "non_causal"
    assert row["acceptance_length"] > 1.3


# --- compare ---


@pytest.mark.slow
def test_compare_writes_what_it_shows(script, pair_flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    run = script("compare")
    file = tmp_path / "figures.json"
    drafts = [pair_flags["dflash"], pair_flags["dflash2"]]
    phase_seconds = run.module.measure.phase_seconds
    monkeypatch.setattr(
        run.module.measure, "phase_seconds",
        lambda *args: phase_seconds(*args, repeats=4, trials=1),
    )  # fmt: skip
    assert run(
        f"--target={pair_flags['target']}", f"--drafts={','.join(drafts)}", "--prompts=2",
        "--prompt_tokens=24", "--max_new_tokens=16", "--draft_tokens=5", f"--json={file}",
    ) == 0  # fmt: skip
    shown = capsys.readouterr().out
    figures = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert (figures["prompts"], figures["max_new_tokens"], figures["draft_tokens"]) == (2, 16, 5)
    assert "2 prompts x 16 tokens, T = 0, K = 5, B = 1, float32" in shown
    settings = figures["settings"]
    assert [row["name"] for row in settings] == ["plain", *drafts]
    table = [[cell.strip() for cell in line.strip("│").split("│")] for line in shown.splitlines()]
    plain = settings[0]
    assert plain["acceptance_length"] is None and plain["acceptance_interval"] == [None, None]
    assert plain["draft_tokens"] == 0 and plain["rounds"] == plain["tokens"] <= 30
    for row in settings:
        assert row["tokens"] == plain["tokens"]
        (cells,) = [cells for cells in table if cells[0] == row["name"]]
        assert cells[1] == f"{row['tokens_per_second']:.0f}"
        assert cells[2] == f"{row['tokens_per_second'] / plain['tokens_per_second']:.2f}"
        assert cells[3] == str(row["rounds"])
        if row is plain:
            continue
        assert cells[4] == f"{row['acceptance_length']:.2f}"
        assert cells[5] == "{:.2f}–{:.2f}".format(*row["acceptance_interval"])
        shares = [f"{100 * share:.0f}" for share in row["accepted_per_position"]]
        assert len(shares) == 5 and cells[6].split() == shares
        assert row["rows_equal_to_plain"] == 2
        cost = row["c_v"] + row["c_d"]
        assert row["c_v"] == pytest.approx(row["costs"]["verify"] / plain["costs"]["verify"])
        model = row["acceptance_length"] / cost * plain["tokens_per_second"]
        assert row["model_tokens_per_second"] == pytest.approx(model)
        assert row["model_share"] == pytest.approx(row["tokens_per_second"] / model)
        assert f"verify costs {row['c_v']:.2f} plain steps, draft {row['c_d']:.2f}" in shown


# --- training scripts ---


@pytest.fixture
def small_training(monkeypatch, small_configs):
    """A few library files and a small geometry in place of the embedded pair's."""
    names = ("abc.py", "bisect.py", "colorsys.py", "enum.py", "heapq.py")
    root = pathlib.Path(ast.__file__).parent
    texts = {name: (root / name).read_text("utf-8") for name in names}

    def library_files(held_out):
        for name, text in texts.items():
            if corpus.is_held_out(name) == held_out:
                yield name, text

    monkeypatch.setattr(corpus, "library_files", library_files)
    for name, config in small_configs.items():
        monkeypatch.setattr(tiny, name.upper(), config)


def steps_of(workdir: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_train_target_then_a_draft_of_each_kind(script, small_training, tmp_path, capsys):
    target = tmp_path / "target"
    assert script("train_target")(
        f"--workdir={tmp_path / 'run'}", f"--output={target}", "--steps=1", "--rows=2",
        "--length=32",
    ) == 0  # fmt: skip
    (row,) = steps_of(tmp_path / "run")
    assert row["step"] == 1 and 4.0 < row["loss"] < 8.0 and 4.0 < row["held_out_loss"] < 8.0
    assert load_pair(target, None).target == tiny.TARGET

    data = tmp_path / "data" / "continuations.npz"
    for kind in ("dflash", "dflash2"):
        output = tmp_path / kind
        flags = [
            f"--kind={kind}", f"--target={target}", f"--workdir={tmp_path / 'runs' / kind}",
            f"--data={data}", f"--output={output}", "--steps=1", "--rows=2", "--anchors=3",
            "--sequences=4", "--length=96",
        ]  # fmt: skip
        assert script("train_draft")(*flags) == 0
        (row,) = steps_of(tmp_path / "runs" / kind)
        assert row["step"] == 1 and row["unary_loss"] > 1.0
        assert ("selector_loss" in row) == (kind == "dflash2")
        pair = load_pair(target, output)
        assert pair.draft == getattr(tiny, kind.upper())
        assert pair.public_vocab <= 300 and pair.eos_token_ids == (0,)
    with np.load(data) as saved:
        assert saved["tokens"].shape == (4, 96)
    # Other flags than those the run and its data were made with are refused, not ignored.
    capsys.readouterr()
    assert script("train_draft")(*flags[:-2], "--sequences=5", "--length=96") == 2
    assert_one_line(capsys.readouterr(), "--data", "4 sequences of 96", "--sequences is 5")
    assert script("train_draft")(*flags, "--gamma=3") == 2
    assert_one_line(capsys.readouterr(), "gamma: got 3.0", "begun with 4.0", "recipe.json")
    # What was written drafts, and greedy text is the target's whatever it drafts.
    capsys.readouterr()
    texts = []
    for draft in (tmp_path / "dflash2", "none"):
        assert script("generate")(
            f"--target={target}", f"--draft={draft}", "--prompt=import", "--max_new_tokens=8",
            "--json",
        ) == 0  # fmt: skip
        (row,) = objects(capsys.readouterr().out)
        check_counts(row, 8)
        texts.append(row["tokens"])
    assert texts[0] == texts[1]


def test_train_draft_refuses_a_target_of_another_geometry(
    script, pair_flags, fixtures_dir, tmp_path, capsys
):
    places = [f"--workdir={tmp_path / 'run'}", f"--data={tmp_path / 'data.npz'}"]
    assert script("train_draft")(f"--target={pair_flags['target']}", *places) == 2
    assert_one_line(capsys.readouterr(), "hidden_size", "192", "32")
    assert script("train_draft")(f"--target={fixtures_dir / 'dense_text'}", *places) == 2
    assert_one_line(capsys.readouterr(), "no tokenizer.json")
    assert not list(tmp_path.iterdir())


def test_make_prompts_repeats_the_committed_choice(script, tmp_path, capsys):
    """Of the library files at hand; other Python versions have other texts, not other rules."""
    output = tmp_path / "prompts.json"
    assert script("make_prompts")(f"--output={output}", "--count=5") == 0
    entries = json.loads(output.read_text("utf-8"))
    assert len(entries) == 5 and all(len(entry["text"]) == 2400 for entry in entries)
    assert all(corpus.is_held_out(entry["source"]) for entry in entries)
    assert "wrote 5 prompts" in capsys.readouterr().out


# --- the README ---


def defined_flags(name: str) -> set[str]:
    """First arguments of the `flags.DEFINE_*` calls of a script, and those of `Sampling`."""
    tree = ast.parse((ROOT / "experiments" / f"{name}.py").read_text("utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = [call for call in calls if isinstance(call.func, ast.Attribute)]
    found = {call.args[0].value for call in calls if call.func.attr.startswith("DEFINE_")}
    if any(call.func.attr == "define_sampling" for call in calls):
        found |= Sampling.__dataclass_fields__.keys()
    return found


def test_documented_commands_exist():
    """README and the scripts' own examples: every script is there and knows the flags."""
    texts = [(ROOT / "README.md").read_text("utf-8")]
    texts += [(ROOT / "experiments" / f"{name}.py").read_text("utf-8") for name in SCRIPTS]
    commands = re.findall(r"-m experiments\.(\w+)((?:[^`\n\\|]|\\\n)*)", "\n".join(texts))
    assert {name for name, _ in commands} <= set(SCRIPTS)
    assert len(commands) > len(SCRIPTS)
    for name, arguments in commands:
        used = set(re.findall(r"--(\w+)", arguments)) - {"help"}
        assert used <= defined_flags(name), name
