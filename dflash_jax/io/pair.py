"""A target and its draft, loaded and checked against each other."""

import dataclasses
import pathlib

import numpy as np
from absl import logging

from dflash_jax.config import (
    Causality,
    ConfigError,
    DraftConfig,
    TargetConfig,
    check_pair,
    parse_draft_config,
    parse_target_config,
)
from dflash_jax.draft.context import CONTEXT_ROLE
from dflash_jax.io.proposal_head import FILE_NAME, read_token_ids
from dflash_jax.io.tensors import read_params
from dflash_jax.io.tokenizer import Tokenizer
from dflash_jax.precision import compute_dtype, separate_dtype
from dflash_jax.typing import Params

PRETRAINED = pathlib.Path(__file__).parents[1] / "pretrained"


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """What generation needs: two models and a tokenizer.

    draft, draft_params: None for plain decoding.
    tokenizer: None when the target's directory has none; prompts are then token ids.
    dtype: compute dtype, "float32" or "bfloat16".
    context_dtype: of the context K/V role where it is represented apart; None shares.
    context_role: that role's K/V projections, held in `context_dtype`; None shares the query
      block's, which are part of `draft_params`.
    proposal_rows: token ids of an indexed proposal head; None proposes from the whole head.
    """

    target: TargetConfig
    target_params: Params
    draft: DraftConfig | None
    draft_params: Params | None
    tokenizer: Tokenizer | None
    dtype: str
    proposal_rows: np.ndarray | None = None
    context_dtype: str | None = None
    context_role: Params | None = None

    @property
    def public_vocab(self) -> int:
        """Ids from here on are padding of the embedding, never sampled nor proposed."""
        return self.tokenizer.vocab_size if self.tokenizer else self.target.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The target's stop ids; the tokenizer's where the target's config names none."""
        if self.target.eos_token_ids or not self.tokenizer:
            return self.target.eos_token_ids
        return tuple(self.tokenizer.eos_token_ids)

    def describe(self) -> str:
        """One line for start-up: what drafts, how wide it was trained, which causality rule."""
        if self.draft is None:
            return f"plain decoding, {self.dtype}"
        apart = f" with {self.context_dtype} context K/V" if self.context_dtype else ""
        return (
            f"{self.draft.name}, trained block {self.draft.block_size}, "
            f"{self.draft.causality.value} block attention, {self.dtype}{apart}{self._head()}"
        )

    def _head(self) -> str:
        if self.proposal_rows is None:
            return ""
        return f", proposals from {len(self.proposal_rows)} of {self.public_vocab} tokens"


def embedded_names() -> list[str]:
    """Names of the checkpoints that come with the package."""
    return sorted(path.name for path in PRETRAINED.iterdir() if (path / "config.json").is_file())


def resolve(name: str) -> pathlib.Path:
    """Directory of an embedded name or of a path.

    Raises:
      ConfigError: neither.
    """
    for path in (PRETRAINED / name, pathlib.Path(name)):
        if path.is_dir():
            return path
    raise ConfigError(
        f"{name}: neither a directory nor an embedded checkpoint ({', '.join(embedded_names())})"
    )


def load_pair(
    target: str = "tiny",
    draft: str | None = "tiny-dflash2",
    dtype: str = "float32",
    *,
    absent_causality: Causality = Causality.NON_CAUSAL,
    proposal_head: str | None = None,
    context_dtype: str | None = None,
) -> Pair:
    """Loads a target and, unless `draft` is None, a draft for it.

    Args:
      target: embedded name or Hugging Face directory.
      draft: likewise.
      dtype: "float32" or "bfloat16".
      absent_causality: what a draft config without `is_causal` means.
      proposal_head: file of an indexed proposal head; "beside" is the one in the draft's
        directory. None proposes from the target's whole head.
      context_dtype: how the context K/V role is represented, its projections and what is stored:
        "float32" or "bfloat16". None shares the weights and the dtype of the query block.

    Raises:
      ConfigError, CheckpointError, TokenizerError, ValueError: all ValueErrors whose message
        names the file and the field.
    """
    directory = resolve(target)
    activations = compute_dtype(dtype)
    target_config = parse_target_config(directory)
    tokenizer = None
    if (directory / "tokenizer.json").is_file():
        tokenizer = Tokenizer.load(directory)
    draft_config = draft_params = role = None
    apart = separate_dtype("context_dtype", context_dtype, dtype)
    if apart and draft is None:
        raise ValueError(f"context_dtype: got {context_dtype!r} without a draft")
    if draft is not None:
        draft_directory = resolve(draft)
        draft_config = parse_draft_config(draft_directory, absent_causality=absent_causality)
        check_pair(target_config, draft_config, tokenizer.vocab_size if tokenizer else None)
        draft_params = read_params(draft_directory, draft_config, activations)
        if apart:
            # From the file, so that a wider role is not rounded through the narrower one.
            role = read_params(
                draft_directory, draft_config, compute_dtype(apart), only=CONTEXT_ROLE
            )
    target_params = read_params(directory, target_config, activations)
    pair = Pair(
        target_config,
        target_params,
        draft_config,
        draft_params,
        tokenizer,
        dtype,
        context_dtype=apart,
        context_role=role,
    )
    if proposal_head is not None:
        if draft is None:
            raise ValueError(f"proposal_head: got {proposal_head!r} without a draft")
        beside = proposal_head == "beside"
        file = draft_directory / FILE_NAME if beside else pathlib.Path(proposal_head)
        shortlist = draft_config.selector_top_k if draft_config.dflash2 else 1
        rows = read_token_ids(file, pair.public_vocab, shortlist)
        pair = dataclasses.replace(pair, proposal_rows=rows)
    logging.info("%s with %s: %s", target, draft, pair.describe())
    return pair
