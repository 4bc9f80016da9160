"""The row map of an indexed proposal head: one small file beside the draft.

Rows themselves are the target's and are taken from it at start-up.
"""

import pathlib

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

FILE_NAME = "proposal_head.safetensors"
_FIELD = "token_ids"


class ProposalHeadError(ValueError):
    """The file is no row map for this pair; the message names file and fault."""


def frequent_tokens(tokens: np.ndarray, rows: int, public_vocab: int) -> np.ndarray:
    """The `rows` most frequent public ids, ascending; the lowest ids among equals."""
    if not 1 <= rows <= public_vocab:
        raise ValueError(f"rows: got {rows}, expected 1..{public_vocab} (the public vocabulary)")
    counts = np.bincount(tokens[tokens < public_vocab], minlength=public_vocab)
    return np.sort(np.argsort(-counts, kind="stable")[:rows]).astype(np.int32)


def write_token_ids(path: str | pathlib.Path, token_ids: np.ndarray) -> None:
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({_FIELD: np.asarray(token_ids, np.int32)}, path)


def read_token_ids(path: str | pathlib.Path, public_vocab: int, at_least: int = 1) -> np.ndarray:
    """Token ids of the head's rows.

    Args:
      public_vocab: ids from here on may not be proposed.
      at_least: rows that the draft's shortlist needs.

    Raises:
      ProposalHeadError: unreadable, or ids that are not distinct, ascending and public.
    """
    path = pathlib.Path(path)
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ProposalHeadError(f"{path}: not a readable safetensors file ({error})") from error
    if _FIELD not in tensors:
        raise ProposalHeadError(f"{path}: no tensor {_FIELD!r}, found {sorted(tensors)}")
    ids = tensors[_FIELD]
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ProposalHeadError(
            f"{path}: {_FIELD} has shape {ids.shape} and dtype {ids.dtype}, expected a list of ids"
        )
    if len(ids) < at_least:
        raise ProposalHeadError(
            f"{path}: {len(ids)} rows, but the draft's shortlist needs {at_least}"
        )
    ids = ids.astype(np.int64)
    if (np.diff(ids) <= 0).any():
        at = int(np.argmax(np.diff(ids) <= 0))
        raise ProposalHeadError(
            f"{path}: {_FIELD}[{at + 1}] is {ids[at + 1]} after {ids[at]}, expected ascending ids"
        )
    if ids[0] < 0 or ids[-1] >= public_vocab:
        bad = ids[0] if ids[0] < 0 else ids[-1]
        raise ProposalHeadError(f"{path}: id {bad}, expected 0..{public_vocab - 1}")
    return ids.astype(np.int32)
