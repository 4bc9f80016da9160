"""The processed target distribution: the one law that every target token obeys.

Plain decoding, every verified column, corrections and bonuses call the same functions, so there
is one law and not two that nearly agree.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.typing import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen.

    temperature: 0 (or less) is greedy: the best token, the lowest id among equals.
    """

    temperature: float = 0.0

    def __post_init__(self):
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature: got {self.temperature}, expected a finite number >= 0")


class Controls(NamedTuple):
    """Per-row controls of a batch, arrays because rows differ."""

    temperature: Float[Array, "B"]


def make_controls(samplings: list[Sampling]) -> Controls:
    return Controls(jnp.asarray([s.temperature for s in samplings], jnp.float32))


def public_logits(logits: Float[Array, "... V"], public_vocab: int) -> Float[Array, "... V"]:
    """Logits with rows beyond the tokenizer's vocabulary at minus infinity."""
    if public_vocab >= logits.shape[-1]:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < public_vocab, logits, -jnp.inf)


def best_token(logits: Float[Array, "... V"], public_vocab: int) -> Int[Array, "..."]:
    """The greedy choice: highest public logit, lowest id among equals."""
    return jnp.argmax(public_logits(logits, public_vocab), axis=-1).astype(jnp.int32)


def target_distribution(
    logits: Float[Array, "B *W V"], controls: Controls, public_vocab: int
) -> Float[Array, "B *W V"]:
    """Probabilities of the next token: public mask, then temperature, then normalisation.

    A greedy row's law is the one-hot of its best token, so that greedy and sampled rows share
    every later step.

    Args:
      logits: float32 target scores, any number of column axes after the row axis.
    """
    public = public_logits(logits, public_vocab)
    temperature = controls.temperature.reshape(-1, *(1,) * (logits.ndim - 1))
    sampled = temperature > 0
    # The best logit is subtracted before the division: a tiny temperature may not overflow.
    scaled = public - jnp.max(public, axis=-1, keepdims=True)
    law = jax.nn.softmax(scaled / jnp.where(sampled, temperature, 1.0), axis=-1)
    greedy = jax.nn.one_hot(jnp.argmax(public, axis=-1), logits.shape[-1], dtype=law.dtype)
    return jnp.where(sampled, law, greedy)
