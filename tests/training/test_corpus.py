"""The split, the tokenizer and the windows."""

import json
import pathlib

import numpy as np
import pytest

from dflash_jax.io.tokenizer import Tokenizer
from dflash_jax.training import corpus
from experiments import prompts

TEXTS = [
    "def add(a, b):\n    return a + b\n",
    "class Ring:\n    def __init__(self, slots):\n        self.slots = slots\n",
]


# --- the split ---


def test_the_split_is_a_fixed_function_of_the_name():
    """Pinned: figures of trained checkpoints rest on it."""
    held_out = ["ast.py", "colorsys.py", "enum.py", "ftplib.py", "getopt.py", "ipaddress.py"]
    trained = ["abc.py", "argparse.py", "asyncio/base_events.py", "json/decoder.py", "os.py"]
    assert all(corpus.is_held_out(name) for name in held_out)
    assert not any(corpus.is_held_out(name) for name in trained)


def test_about_a_tenth_is_held_out():
    names = [f"package{i % 50}/module{i}.py" for i in range(10_000)]
    assert 900 < sum(map(corpus.is_held_out, names)) < 1100


@pytest.fixture(scope="module")
def sides():
    return {held_out: dict(corpus.library_files(held_out)) for held_out in (False, True)}


def test_the_two_sides_are_disjoint_and_cover_the_library(sides):
    train, held_out = sides[False], sides[True]
    assert not train.keys() & held_out.keys()
    assert all(corpus.is_held_out(name) for name in held_out)
    assert 0.06 < len(held_out) / (len(train) + len(held_out)) < 0.14
    # Whole files, in the order of their names.
    for name in ("abc.py", "json/decoder.py"):
        side = train if name in train else held_out
        source = pathlib.Path(json.__file__).parents[1] / name
        assert side[name] == source.read_text("utf-8")
    for side in sides.values():
        assert list(side) == sorted(side, key=pathlib.PurePath)
        assert not any("site-packages" in name or name.startswith("encodings/") for name in side)


def test_the_committed_prompts_were_not_trained_on():
    entries = json.loads(prompts.FILE.read_text("utf-8"))
    assert len(entries) == 64
    assert all(corpus.is_held_out(entry["source"]) for entry in entries)
    assert len({entry["source"] for entry in entries}) == 64
    assert all(entry["text"].startswith(("def ", "class ")) for entry in entries)


# --- tokenizer ---


@pytest.fixture(scope="module")
def tokenizer():
    return corpus.train_tokenizer(iter(TEXTS * 20), vocab_size=290)


@pytest.fixture(scope="module")
def codec(tokenizer):
    return Tokenizer(tokenizer, (0,))


@pytest.mark.parametrize(
    "text",
    [
        TEXTS[0],
        "  leading and trailing  ",
        "\ttabs\r\n\n and\x00control\x7f",
        "naïve café ☃ 日本語 🎉",
        "".join(map(chr, range(1, 256))),
    ],
)
def test_any_text_survives_the_round_trip(codec, text):
    assert codec.decode(codec.encode(text)) == text


def test_merges_are_learned_and_specials_come_first(tokenizer, codec):
    assert codec.vocab_size == 290
    assert tokenizer.token_to_id(corpus.END_OF_TEXT) == 0
    assert tokenizer.token_to_id(corpus.MASK) == 1
    assert len(codec.encode(TEXTS[0])) < 0.7 * len(TEXTS[0])
    assert min(codec.encode(TEXTS[0] + TEXTS[1])) > 1
    assert codec.encode(corpus.END_OF_TEXT) == [0]


def test_written_files_load_as_the_same_tokenizer(tmp_path, tokenizer, codec):
    for name, content in corpus.tokenizer_files(tokenizer, 512).items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    loaded = Tokenizer.load(tmp_path)
    assert loaded.eos_token_ids == (0,)
    assert loaded.vocab_size == codec.vocab_size
    for text in TEXTS:
        assert loaded.encode(text) == codec.encode(text)


def test_stream_has_an_end_after_each_file(monkeypatch, tokenizer, codec):
    sides = {False: TEXTS, True: TEXTS[:1]}
    monkeypatch.setattr(corpus, "library_files", lambda held_out: enumerate(sides[held_out]))
    first, second = map(codec.encode, TEXTS)
    stream = corpus.token_stream(codec, held_out=False)
    assert stream.dtype == np.int32
    assert stream.tolist() == [*first, 0, *second, 0]
    assert corpus.token_stream(codec, held_out=True).tolist() == [*first, 0]
    with pytest.raises(ValueError, match="expected exactly one"):
        corpus.token_stream(Tokenizer(tokenizer), held_out=False)


# --- windows ---


def test_windows_are_runs_of_the_stream():
    stream = np.arange(1000, 1100, dtype=np.int32)
    rows = np.concatenate([corpus.windows(stream, 12, 8, seed=0, step=step) for step in range(100)])
    assert rows.shape == (800, 12)
    assert (np.diff(rows, axis=1) == 1).all()
    assert rows[:, 0].min() == 1000 and rows[:, -1].max() >= 1098


def test_windows_depend_on_seed_and_step_only():
    stream = np.arange(5000, dtype=np.int32)

    def draw(seed, step):
        return corpus.windows(stream, 4, 6, seed, step)

    first = draw(3, 8)
    draw(3, 9)  # what was drawn in between does not matter
    np.testing.assert_array_equal(draw(3, 8), first)
    assert (draw(3, 9) != first).any() and (draw(4, 8) != first).any()
