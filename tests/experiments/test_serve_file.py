"""A file of requests: results in order of completion, taken up again, and mistakes by line."""

import json

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache as xla_cache

from dflash_jax import Engine, load_pair
from experiments.requests_file import open_results, read_requests

REQUESTS = [
    {"id": "long", "prompt": "def add(a, b):", "max_new_tokens": 40, "ignore_eos": True},
    {"id": "short", "prompt": "class Ring:", "max_new_tokens": 2, "ignore_eos": True},
    {"id": "hot", "tokens": [5, 6, 7], "max_new_tokens": 9, "temperature": 0.9, "seed": 3},
    {"id": "stopped", "prompt": "def main():", "max_new_tokens": 30, "stop": ["e", "r"]},
]


@pytest.fixture
def serve(script, pair_flags, tmp_path):
    """`(requests, *flags) -> exit code`; the files are `requests.jsonl` and `results.jsonl`."""
    run = script("serve_file")

    def call(*flags, lines=None):
        lines = [json.dumps(r) for r in REQUESTS] if lines is None else lines
        (tmp_path / "requests.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
        return run(
            f"--target={pair_flags['target']}", f"--draft={pair_flags['dflash2']}", "--rows=3",
            "--draft_tokens=3", "--max_context=128", f"--input={tmp_path / 'requests.jsonl'}",
            f"--output={tmp_path / 'results.jsonl'}", *flags,
        )  # fmt: skip

    return call


def results(tmp_path):
    return [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]


@pytest.fixture
def cache_dir(tmp_path):
    """A place for compiled programs; afterwards JAX's settings are as they were."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield tmp_path / "programs"
    for name, value in before.items():
        jax.config.update(name, value)
    xla_cache.reset_cache()


@pytest.mark.slow
def test_results_come_as_they_are_done_and_a_run_is_taken_up(
    serve, pair_flags, tmp_path, cache_dir, capsys
):
    assert serve(f"--compilation_cache={cache_dir}") == 0
    kept = [path.name for path in cache_dir.iterdir()]
    for program in ("install", "prefill", "choose_anchor", "speculate", "commit"):
        assert any(name.startswith(f"jit_{program}-") for name in kept), program
    assert "compiled write_pages" in capsys.readouterr().err
    first = results(tmp_path)
    order = [row["id"] for row in first]
    assert sorted(order) == ["hot", "long", "short", "stopped"] and order[0] == "short"
    by_id = {row["id"]: row for row in first}
    # The same as the library gives, one at a time.
    engine = Engine(
        load_pair(pair_flags["target"], pair_flags["dflash2"]),
        max_rows=3, draft_tokens=3, max_context=128,
    )  # fmt: skip
    for key, (_, arguments) in read_requests(tmp_path / "requests.jsonl").items():
        alone = engine.submit(**arguments)
        engine.run()
        row = by_id[key]
        assert (row["tokens"], row["text"]) == (alone.tokens, alone.text)
        assert row["finish_reason"] == alone.finish_reason and row["error"] is None
        assert row["statistics"]["committed"] == len(alone.tokens) - 1
        assert row["prompt_tokens"] == len(alone.prompt)
    # All there: nothing is run again. One torn: that one alone is.
    assert serve() == 0 and results(tmp_path) == first
    whole = (tmp_path / "results.jsonl").read_bytes()
    (tmp_path / "results.jsonl").write_bytes(whole[:-20])
    capsys.readouterr()
    assert serve() == 0
    assert results(tmp_path)[:3] == first[:3]
    again, torn = results(tmp_path)[3], first[3]
    assert again["id"] == torn["id"]
    assert again["tokens"] == torn["tokens"]
    # What only an engine can refuse is said with its line too, before anything is written.
    (tmp_path / "results.jsonl").unlink()
    long = {"id": "b", "tokens": [1] * 100, "max_new_tokens": 29}
    assert serve(lines=[json.dumps(REQUESTS[0]), json.dumps(long)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "line 2: prompt of 100 tokens and max_new_tokens 29 need 129 positions" in error
    assert not results(tmp_path)


MISTAKES = {
    "no json": ("{", "line 2: "),
    "no object": ("[1]", "line 2: got [1], expected an object"),
    "no id": ('{"prompt": "a"}', "line 2: id: got None"),
    "number as id": ('{"id": 3, "prompt": "a"}', "line 2: id: got 3"),
    "id twice": ('{"id": "long", "prompt": "a"}', "id 'long' was used in line 1 already"),
    "no prompt": ('{"id": "a"}', "line 2: expected either prompt or tokens"),
    "two prompts": ('{"id": "a", "prompt": "a", "tokens": [1]}', "either prompt or tokens"),
    "prompt": ('{"id": "a", "prompt": 3}', "prompt: got 3"),
    "tokens": ('{"id": "a", "tokens": [1, "b"]}', "tokens: got [1, 'b']"),
    "unknown": ('{"id": "a", "prompt": "a", "max_tokens": 3}', "unknown field 'max_tokens'"),
    "sampling": ('{"id": "a", "prompt": "a", "top_p": 3}', "top_p: got 3"),
    "kind": ('{"id": "a", "prompt": "a", "top_p": "x"}', "line 2: "),
}


@pytest.mark.parametrize(("line", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_bad_line_is_one_error_that_names_it(serve, tmp_path, capsys, line, message):
    assert serve(lines=[json.dumps(REQUESTS[0]), line]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and "requests.jsonl, line 2: " in error
    assert message in error
    assert not (tmp_path / "results.jsonl").exists()


def test_a_file_that_holds_no_results_is_left_alone(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text('{"id": "a"}\nnot mine\nhalf')
    with pytest.raises(ValueError, match="line 2: not a result"):
        open_results(file)
    assert file.read_text().endswith("half")


def test_results_are_taken_up_without_their_torn_line(tmp_path):
    file = tmp_path / "results.jsonl"
    assert open_results(file) == set() and file.read_bytes() == b""
    file.write_bytes(b'{"id": "a"}\n{"id": "b"}\n{"id": "c", "te')
    assert open_results(file) == {"a", "b"}
    assert file.read_bytes() == b'{"id": "a"}\n{"id": "b"}\n'
    # Torn inside a character.
    file.write_bytes(b'{"id": "a"}\n{"id": "\xc3')
    assert open_results(file) == {"a"}


@pytest.mark.slow
def test_profile_adds_up(script, pair_flags, tmp_path, capsys):
    file = tmp_path / "times.json"
    assert script("profile_round")(
        f"--target={pair_flags['target']}", f"--draft={pair_flags['dflash']}", "--rows=2",
        "--draft_tokens=3", "--prompt_tokens=20", "--rounds=7", f"--json={file}",
    ) == 0  # fmt: skip
    shown = capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert list(figures["phases alone"]) == ["catch_up", "propose", "verify", "accept", "commit"]
    assert list(figures["round"]) == ["speculate and egress", "commit", "host", "whole"]
    assert all(
        value > 0 for group in ("phases alone", "round") for value in figures[group].values()
    )
    # No part of a round is longer than the round, whatever else the machine does.
    assert max(figures["round"].values()) == figures["round"]["whole"]
    assert figures["engine"].endswith("2 rows of 77 tokens, 3 draft tokens")
    for name in ("catch_up", "verify", "host", "whole", "% of round"):
        assert name in shown
