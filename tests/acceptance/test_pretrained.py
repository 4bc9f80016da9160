"""The embedded checkpoints: size, layout, cards, and what was held out."""

import json

import pytest

from dflash_jax import load_pair
from dflash_jax.io.pair import PRETRAINED, embedded_names
from dflash_jax.training.corpus import is_held_out
from experiments.prompts import FILE

NAMES = ["tiny", "tiny-dflash", "tiny-dflash2"]


def test_names_and_size():
    assert embedded_names() == NAMES
    total = sum(path.stat().st_size for path in PRETRAINED.rglob("*") if path.is_file())
    assert total <= 40 * 2**20


@pytest.mark.parametrize("name", NAMES)
def test_each_has_a_card(name):
    card = (PRETRAINED / name / "README.md").read_text("utf-8")
    for word in ("Data", "Command", "Steps", "Loss"):
        assert word in card, word


def test_windows_wrap_in_ordinary_use():
    pair = load_pair("tiny", "tiny-dflash2")
    assert pair.draft.layer_types == ("sliding_attention",) * 3
    assert pair.draft.sliding_window == 256
    assert load_pair("tiny", "tiny-dflash").draft.layer_types[-1] == "full_attention"


def test_held_out_prompts_are_held_out():
    entries = json.loads(FILE.read_text("utf-8"))
    assert len(entries) == 64
    assert all(is_held_out(entry["source"]) for entry in entries)
    assert len({entry["source"] for entry in entries}) == 64
