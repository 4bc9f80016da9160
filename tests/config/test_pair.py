"""Does a draft fit a target: every mismatch is an error with both numbers."""

import dataclasses
import pathlib

import pytest

from dflash_jax.config import ConfigError, check_pair, parse_draft_config, parse_target_config

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
GEOMETRIES = pathlib.Path(__file__).parents[1] / "geometries"
TARGET = parse_target_config(FIXTURES / "dense_text")
DRAFT = parse_draft_config(FIXTURES / "mid_dense_v2")


def draft(**fields):
    return dataclasses.replace(DRAFT, **fields)


def test_fitting_pairs():
    check_pair(TARGET, DRAFT)
    check_pair(TARGET, DRAFT, tokenizer_size=512)
    target = parse_target_config(GEOMETRIES / "qwen3.5-27b.json")
    for name in ("qwen3.8-27b-dflash2", "qwen3.6-27b-dflash"):
        check_pair(target, parse_draft_config(GEOMETRIES / f"{name}.json"), tokenizer_size=248070)


@pytest.mark.parametrize("ids", [(7,), (0,), (5, 1, 3)])
def test_any_order_and_the_last_block_are_fine(ids):
    check_pair(TARGET, draft(target_layer_ids=ids))


def test_mask_id_beyond_the_tokenizer_is_an_embedding_row():
    check_pair(TARGET, draft(mask_token_id=511), tokenizer_size=400)


@pytest.mark.parametrize("draft_vocab", [448, 640])
def test_vocabularies_that_differ_in_padding_only(draft_vocab):
    check_pair(TARGET, draft(vocab_size=draft_vocab), tokenizer_size=448)
    with pytest.raises(ConfigError, match=f"{draft_vocab}, of the target 512; without a token"):
        check_pair(TARGET, draft(vocab_size=draft_vocab))


@pytest.mark.parametrize(
    ("fields", "tokenizer_size", "message"),
    [
        (dict(hidden_size=32), None, "hidden_size of the draft is 32, of the target 64"),
        (dict(target_layer_ids=(1, 8)), None, r"target_layer_ids .* has 8, .* blocks are 0\.\.7"),
        (dict(target_layer_ids=(-1,)), None, r"target_layer_ids .* has -1, .* blocks are 0\.\.7"),
        (dict(target_layer_ids=(1, 3, 1)), None, r"duplicates: \[1, 3, 1\]"),
        (dict(num_target_layers=9), None, "num_target_layers of the draft is 9, .*_layers 8"),
        (dict(vocab_size=447), 448, "draft is 447, of the target 512, and the tokenizer has 448"),
        ({}, 513, "tokenizer has 513 ids, but the target's vocab_size is 512"),
        (dict(mask_token_id=512), None, "mask_token_id of the draft is 512, .* has 512 rows"),
        (dict(mask_token_id=-1), None, "mask_token_id of the draft is -1, .* has 512 rows"),
    ],
)
def test_mismatch(fields, tokenizer_size, message):
    with pytest.raises(ConfigError, match=message):
        check_pair(TARGET, draft(**fields), tokenizer_size)


def test_unknown_target_layer_count_is_not_held_against_the_draft():
    check_pair(TARGET, draft(num_target_layers=None))
