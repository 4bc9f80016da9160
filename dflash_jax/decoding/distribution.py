"""The processed target distribution: the one law that every target token obeys.

Plain decoding, every verified column, corrections and bonuses call the same functions, so there
is one law and not two that nearly agree. Its stages, in order: public-vocabulary mask, penalties
(repetition, then presence and frequency), temperature, top-k, top-p, min-p, normalisation.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.state.counts import TokenCounts
from dflash_jax.typing import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen; the defaults leave the target's own law alone.

    temperature: 0 is greedy: the best token, the lowest id among equals.
    top_k: keep the k best tokens, exactly k (the lowest ids among equals); 0 keeps all.
    top_p: keep a token while the mass of those before it is below `top_p`; the best one stays.
    min_p: keep tokens with at least `min_p` times the best one's mass.
    presence_penalty: subtracted from the logit of every token published so far.
    frequency_penalty: subtracted once for each time it was published.
    repetition_penalty: divides positive logits, multiplies negative ones, of tokens of prompt and
      output (Keskar et al., 2019); 1 is none.

    Penalties act on greedy rows too; the filters cannot change a greedy choice.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        for name, expected, valid in (
            ("temperature", "a finite number >= 0", self.temperature >= 0),
            ("top_k", "a whole number >= 0", _is_whole(self.top_k) and self.top_k >= 0),
            ("top_p", "a number in 0..1", 0 <= self.top_p <= 1),
            ("min_p", "a number in 0..1", 0 <= self.min_p <= 1),
            ("presence_penalty", "a finite number", True),
            ("frequency_penalty", "a finite number", True),
            ("repetition_penalty", "a finite number > 0", self.repetition_penalty > 0),
        ):
            value = getattr(self, name)
            if not (valid and math.isfinite(value)):
                raise ValueError(f"{name}: got {value}, expected {expected}")


def _is_whole(value) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


class Controls(NamedTuple):
    """Per-row controls of a batch, arrays because rows differ.

    The first seven are `Sampling`'s fields. `stop_ids` holds the ids that end a row when they are
    published, padded with -1; before absolute position `stop_from` they have no mass.
    """

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]
    presence_penalty: Float[Array, "B"]
    frequency_penalty: Float[Array, "B"]
    repetition_penalty: Float[Array, "B"]
    stop_ids: Int[Array, "B E"]
    stop_from: Int[Array, "B"]


def make_controls(
    samplings: list[Sampling],
    stop_ids: list[tuple[int, ...]] | None = None,
    stop_from: list[int] | None = None,
    width: int = 0,
) -> Controls:
    """Stacks the rows' controls.

    Args:
      stop_ids: ids that end each row; none by default.
      stop_from: absolute position from which each row may stop; 0 by default.
      width: smallest number of stop-id columns, so that batches share a compiled program.
    """
    rows = len(samplings)
    stop_ids = stop_ids or [()] * rows
    padded = np.full((rows, max([width, *map(len, stop_ids)])), -1, np.int32)
    for row, ids in enumerate(stop_ids):
        padded[row, : len(ids)] = ids
    # A top_k beyond int32 keeps everything, like any other beyond the vocabulary.
    samplings = [dataclasses.replace(s, top_k=min(s.top_k, 2**31 - 1)) for s in samplings]
    values = [
        np.asarray(
            [getattr(s, field.name) for s in samplings],
            np.int32 if field.name == "top_k" else np.float32,
        )
        for field in dataclasses.fields(Sampling)
    ]
    earliest = np.asarray(stop_from or [0] * rows, np.int32)
    # Not jnp.asarray: for every new shape it would compile a program of its own.
    return jax.device_put(Controls(*values, padded, earliest))


def public_logits(logits: Float[Array, "... V"], public_vocab: int) -> Float[Array, "... V"]:
    """Logits with rows beyond the tokenizer's vocabulary at minus infinity."""
    if public_vocab >= logits.shape[-1]:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < public_vocab, logits, -jnp.inf)


def process_logits(
    logits: Float[Array, "B W V"],
    controls: Controls,
    counts: TokenCounts,
    drafted: Int[Array, "B K"],
    position: Int[Array, "B"],
    public_vocab: int,
) -> Float[Array, "B W V"]:
    """Public mask, stop ids that may not come yet, penalties: everything before temperature.

    Args:
      logits: float32 target scores; column i is the law of position `position + i`.
      counts: tokens of the prompt and those published, the anchor included.
      drafted: proposals, K = W - 1; column i counts the first i of them as published, which is
        what they are wherever that column decides anything.
    """
    logits = public_logits(logits, public_vocab)
    logits = jax.lax.cond(
        jnp.any(position < controls.stop_from),
        lambda: _without_early_stops(logits, controls, position),
        lambda: logits,
    )
    penalised = (
        (controls.repetition_penalty != 1)
        | (controls.presence_penalty != 0)
        | (controls.frequency_penalty != 0)
    )
    return jax.lax.cond(
        jnp.any(penalised),
        lambda: _penalise(logits, controls, counts, drafted),
        lambda: logits,
    )


def _without_early_stops(logits, controls, position):
    rows, columns, vocab_size = logits.shape
    early = position[:, None] + jnp.arange(columns) < controls.stop_from[:, None]
    ids = jnp.where(controls.stop_ids >= 0, controls.stop_ids, vocab_size)
    stops = jnp.zeros((rows, vocab_size), bool)
    stops = stops.at[jnp.arange(rows)[:, None], ids].set(True, mode="drop")
    return jnp.where(early[..., None] & stops[:, None], -jnp.inf, logits)


def _penalise(logits, controls, counts, drafted):
    rows, columns, vocab_size = logits.shape
    output = counts.output[:, None]
    if columns > 1:
        row, column = jnp.arange(rows)[:, None], jnp.arange(1, columns)
        added = jnp.zeros((rows, columns, vocab_size), jnp.int32)
        added = added.at[row, column, drafted].add(1, mode="drop")
        output = output + jnp.cumsum(added, axis=1)

    def per_row(value):
        return value[:, None, None]

    repetition = per_row(controls.repetition_penalty)
    repeated = counts.prompt[:, None] | (output > 0)
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(repeated, scaled, logits)
    # A token never published is not touched: zero times an infinite penalty stays out of it.
    penalty = per_row(controls.presence_penalty) + per_row(controls.frequency_penalty) * output
    return logits - jnp.where(output > 0, penalty, 0.0)


def best_token(processed: Float[Array, "... V"]) -> Int[Array, "..."]:
    """The greedy choice among processed logits: the lowest id among equals."""
    return jnp.argmax(processed, axis=-1).astype(jnp.int32)


def target_distribution(
    processed: Float[Array, "B W V"], controls: Controls
) -> Float[Array, "B W V"]:
    """Probabilities of the next token: temperature, top-k, top-p, min-p, normalisation.

    A greedy row's law is the one-hot of its best token, so that greedy and sampled rows share
    every later step.

    Args:
      processed: from `process_logits`.
    """
    sampled = (controls.temperature > 0)[:, None, None]
    temperature = jnp.where(sampled, controls.temperature[:, None, None], 1.0)
    # The best logit is subtracted before the division: a tiny temperature may not overflow.
    scaled = (processed - jnp.max(processed, axis=-1, keepdims=True)) / temperature
    filtered = (controls.top_k > 0) | (controls.top_p < 1) | (controls.min_p > 0)
    scaled = jax.lax.cond(
        jnp.any(filtered & (controls.temperature > 0)),
        lambda: jnp.where(_kept(scaled, controls), scaled, -jnp.inf),
        lambda: scaled,
    )
    greedy = jax.nn.one_hot(best_token(processed), processed.shape[-1], dtype=scaled.dtype)
    return jnp.where(sampled, jax.nn.softmax(scaled, axis=-1), greedy)


def _kept(scaled, controls):
    """Tokens that survive the filters; each filter sees the normalised law that the last left."""
    top_k, top_p, min_p = (
        value[:, None, None] for value in (controls.top_k, controls.top_p, controls.min_p)
    )
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    keep = (top_k == 0) | (jnp.arange(scaled.shape[-1]) < top_k)
    law = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
    before = jnp.roll(jnp.cumsum(law, axis=-1), 1, axis=-1).at[..., 0].set(-1.0)
    # At 1 the filter is off; the rounded sum may reach 1 before the last token.
    keep &= (top_p >= 1) | (before < top_p)
    keep &= law >= min_p * law[..., :1]
    return jnp.put_along_axis(jnp.zeros_like(keep), order, keep, axis=-1, inplace=False)
