"""Does a draft fit a target? JAX clamps and wraps what does not, so it is asked beforehand."""

from absl import logging

from dflash_jax.config.draft import DraftConfig
from dflash_jax.config.reading import ConfigError
from dflash_jax.config.target import TargetConfig


def check_pair(target: TargetConfig, draft: DraftConfig, tokenizer_size: int | None = None) -> None:
    """Raises unless the draft can be run on this target.

    Vocabularies may differ only in padding: both cover the tokenizer, whose size must then
    be known. A mask id beyond the tokenizer but below the embedding rows is fine.

    Args:
      target: the target's geometry.
      draft: the draft's geometry.
      tokenizer_size: token ids in use (highest + 1), where a tokenizer is at hand.

    Raises:
      ConfigError: names the field of each side with its number.
    """
    if draft.hidden_size != target.hidden_size:
        raise ConfigError(
            f"hidden_size of the draft is {draft.hidden_size}, of the target {target.hidden_size}"
        )
    _check_layers(target, draft)
    _check_vocabulary(target, draft, tokenizer_size)
    if not 0 <= draft.mask_token_id < target.vocab_size:
        raise ConfigError(
            f"mask_token_id of the draft is {draft.mask_token_id}, but the target's embedding "
            f"has {target.vocab_size} rows"
        )


def _check_layers(target: TargetConfig, draft: DraftConfig) -> None:
    layers, ids = target.num_hidden_layers, draft.target_layer_ids
    if draft.num_target_layers not in (None, layers):
        raise ConfigError(
            f"num_target_layers of the draft is {draft.num_target_layers}, but the target has "
            f"num_hidden_layers {layers}"
        )
    for index in ids:
        if not 0 <= index < layers:
            raise ConfigError(
                f"target_layer_ids of the draft has {index}, but the target's blocks are "
                f"0..{layers - 1}"
            )
    if len(set(ids)) != len(ids):
        raise ConfigError(f"target_layer_ids of the draft has duplicates: {list(ids)}")


def _check_vocabulary(target: TargetConfig, draft: DraftConfig, tokenizer_size: int | None) -> None:
    if tokenizer_size is not None and tokenizer_size > target.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer_size} ids, but the target's vocab_size is "
            f"{target.vocab_size}"
        )
    if draft.vocab_size == target.vocab_size:
        return
    numbers = f"vocab_size of the draft is {draft.vocab_size}, of the target {target.vocab_size}"
    if tokenizer_size is None:
        raise ConfigError(f"{numbers}; without a tokenizer they must be equal")
    if draft.vocab_size < tokenizer_size:
        raise ConfigError(f"{numbers}, and the tokenizer has {tokenizer_size} ids")
    logging.info("%s: only padding, both cover the tokenizer's %d ids", numbers, tokenizer_size)
