"""The file of an indexed proposal head: written, read, refused."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_jax.io.pair import load_pair
from dflash_jax.io.proposal_head import (
    FILE_NAME,
    ProposalHeadError,
    frequent_tokens,
    read_token_ids,
    write_token_ids,
)


def test_frequent_tokens_ascend_and_ties_take_the_lowest_ids():
    tokens = np.array([5, 5, 5, 2, 2, 7, 9, 9, 9, 9, 0, 8])
    assert frequent_tokens(tokens, 3, 9).tolist() == [0, 2, 5]  # 9 is no public id
    assert frequent_tokens(tokens, 4, 10).tolist() == [0, 2, 5, 9]
    assert frequent_tokens(tokens, 10, 10).tolist() == list(range(10))
    for rows in (0, 11):
        with pytest.raises(ValueError, match=f"rows: got {rows}, expected 1..10"):
            frequent_tokens(tokens, rows, 10)


def test_what_is_written_is_read(tmp_path):
    write_token_ids(tmp_path / "new" / "head.safetensors", np.array([1, 4, 6]))
    ids = read_token_ids(tmp_path / "new" / "head.safetensors", 7, at_least=3)
    assert ids.dtype == np.int32 and ids.tolist() == [1, 4, 6]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 4, 4], r"token_ids\[2\] is 4 after 4"),
        ([4, 1, 5], r"token_ids\[1\] is 1 after 4"),
        ([1, 2, 7], r"id 7, expected 0..6"),
        ([-1, 2, 3], r"id -1, expected 0..6"),
        ([1, 2], r"2 rows, but the draft's shortlist needs 3"),
        ([[1, 2, 3]], r"shape \(1, 3\)"),
        ([1.0, 2.0, 3.0], r"dtype float64"),
    ],
)
def test_bad_ids_are_refused_by_name(tmp_path, ids, message):
    path = tmp_path / "head.safetensors"
    save_file({"token_ids": np.array(ids)}, path)
    with pytest.raises(ProposalHeadError, match=message) as raised:
        read_token_ids(path, 7, at_least=3)
    assert str(path) in str(raised.value)


def test_a_file_that_is_no_head_is_refused(tmp_path):
    path = tmp_path / "head.safetensors"
    with pytest.raises(ProposalHeadError, match="not a readable"):
        read_token_ids(path, 7)
    path.write_bytes(b"not safetensors")
    with pytest.raises(ProposalHeadError, match="not a readable"):
        read_token_ids(path, 7)
    save_file({"rows": np.arange(3)}, path)
    with pytest.raises(ProposalHeadError, match="no tensor 'token_ids', found"):
        read_token_ids(path, 7)


def test_a_head_is_chosen_at_start_up(tmp_path):
    path = tmp_path / FILE_NAME
    write_token_ids(path, np.arange(0, 600, 2))
    pair = load_pair("tiny", "tiny-dflash", proposal_head=str(path))
    assert pair.proposal_rows.tolist() == list(range(0, 600, 2))
    assert "proposals from 300 of 1024 tokens" in pair.describe()
    with pytest.raises(ValueError, match="without a draft"):
        load_pair("tiny", None, proposal_head=str(path))
    with pytest.raises(ProposalHeadError, match=FILE_NAME):
        load_pair("tiny", "tiny-dflash", proposal_head="beside")  # none is committed there
    write_token_ids(path, np.arange(15))
    with pytest.raises(ProposalHeadError, match="15 rows, but the draft's shortlist needs 16"):
        load_pair("tiny", "tiny-dflash2", proposal_head=str(path))
