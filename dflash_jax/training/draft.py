"""Losses of DFlash and DFlash2 on the target's own continuations.

Unary loss on every mask column with weight `exp(-(k - 1) / gamma)` (DFlash paper); DFlash2 adds a
cross-entropy over the unary top-k with the teacher-forced predecessor. Embedding and head are
the target's, frozen.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.draft.model import DraftModel
from dflash_jax.draft.proposal_head import proposal_scores
from dflash_jax.target.model import TargetModel
from dflash_jax.training.anchors import attend_packed, block_targets
from dflash_jax.training.target import hidden_states
from dflash_jax.typing import Array, Bool, Float, Int, Params
from pallas_kernels.elementary import stable_top_k


@dataclasses.dataclass(frozen=True)
class DraftLoss:
    """Choices of the recipe.

    gamma: decay of the column weights (paper: 4 for block 8).
    soft: learn the target's law at each position instead of the drawn token, on sampled rows;
      greedy rows always learn the token.
    outside: what a gold token outside the top-k does to the selector loss: "replace" puts it in
      place of the weakest candidate, "skip" leaves the column out.
    selector_weight: factor of the selector loss.
    """

    gamma: float = 4.0
    soft: bool = True
    outside: str = "replace"
    selector_weight: float = 1.0

    def __post_init__(self):
        if self.outside not in ("replace", "skip"):
            raise ValueError(f"outside: got {self.outside!r}, expected 'replace' or 'skip'")


class Batch(NamedTuple):
    """tokens `[B, T]`; greedy `[B]`: how the target chose them; anchors `[B, A]`."""

    tokens: Int[Array, "B T"]
    greedy: Bool[Array, "B"]
    anchors: Int[Array, "B A"]


def pick_rows(total: int, rows: int, seed: int, step: int) -> np.ndarray:
    """Indices of the sequences of batch `step`; every epoch visits each sequence once.

    Where `rows` does not divide `total`, the batch at the border has the end of one epoch and the
    beginning of the next.
    """
    epoch, at = np.divmod(step * rows + np.arange(rows), total)
    orders = {e: np.random.default_rng((seed, e, 2)).permutation(total) for e in np.unique(epoch)}
    return np.asarray([orders[e][i] for e, i in zip(epoch, at, strict=True)])


def init_params(config: DraftConfig, seed: int) -> Params:
    """Fresh draft parameters; DFlash2 starts out computing exactly what DFlash would."""
    model = DraftModel(config)
    features = jnp.zeros((1, 1, len(config.target_layer_ids) * config.hidden_size))

    def touch(model):
        key, value, gain = model.context(features)
        anchors = jnp.zeros((1, 1), jnp.int32)
        attend = attend_packed(config, key, value, gain, anchors, 2)
        hidden = model(jnp.zeros((1, 2, config.hidden_size)), jnp.arange(2)[None], attend)
        return model.select(hidden) if config.dflash2 else hidden

    return jax.jit(lambda key: model.init(key, method=touch))(jax.random.key(seed))["params"]


def block_hidden(
    config: DraftConfig,
    params: Params,
    features: Float[Array, "B T F"],
    embeddings: Float[Array, "BA W H"],
    anchors: Int[Array, "B A"],
) -> Float[Array, "BA W H"]:
    """Hidden columns of all packed blocks."""
    model, width = DraftModel(config), embeddings.shape[1]
    key, value, gain = model.apply({"params": params}, features, method="context")
    positions = anchors.reshape(-1, 1) + jnp.arange(width)
    attend = attend_packed(config, key, value, gain, anchors, width)
    return model.apply({"params": params}, embeddings, positions, attend)


def make_loss(
    target: TargetConfig,
    target_params: Params,
    config: DraftConfig,
    draft_tokens: int,
    public_vocab: int,
    recipe: DraftLoss,
):
    """`(draft params, Batch) -> (loss, metrics)`; metrics are means over mask columns."""
    head = TargetModel(target)

    def apply_target(*args, method):
        return head.apply({"params": target_params}, *args, method=method)

    column = jnp.arange(draft_tokens)
    weight = jnp.exp(-column / recipe.gamma)
    weight = weight / jnp.sum(weight)

    def loss(params: Params, batch: Batch):
        block = hidden_states(target, target_params, batch.tokens, config.target_layer_ids)
        words = block_targets(batch.tokens, batch.anchors, draft_tokens)
        words = words.reshape(-1, draft_tokens + 1)
        labels = words[:, 1:]
        masked = jnp.full_like(words, config.mask_token_id).at[:, 0].set(words[:, 0])
        embeddings = apply_target(masked, method="embed")
        features = jax.lax.stop_gradient(block.taps)
        hidden = block_hidden(config, params, features, embeddings, batch.anchors)[:, 1:]
        scores = proposal_scores(config, apply_target(hidden, method="logits"), public_vocab)

        law = jax.nn.one_hot(labels, scores.shape[-1])
        if recipe.soft:
            # Column k predicts position p + k, whose law the target gives at p + k - 1.
            index = (batch.anchors[..., None] + column)[..., None]
            before = jnp.take_along_axis(block.hidden[:, None], index, axis=2)
            logits = apply_target(before.reshape(*labels.shape, -1), method="logits")
            public = jnp.arange(logits.shape[-1]) < public_vocab
            soft = jax.nn.softmax(jnp.where(public, logits, -jnp.inf))
            sampled = jnp.repeat(~batch.greedy, batch.anchors.shape[1])
            law = jnp.where(sampled[:, None, None], soft, law)
        law = jax.lax.stop_gradient(law)

        # -inf of padded rows times their zero mass would be NaN.
        log_q = jnp.where(jnp.isfinite(scores), jax.nn.log_softmax(scores), 0.0)
        unary = -jnp.sum(law * log_q, axis=-1)
        metrics = {
            "unary_loss": jnp.mean(unary),
            "accuracy": jnp.mean(jnp.argmax(scores, -1) == labels),
            "first_accuracy": jnp.mean(jnp.argmax(scores[:, 0], -1) == labels[:, 0]),
        }
        total = jnp.mean(jnp.sum(unary * weight, axis=-1))
        if config.dflash2:
            extra, more = _selector_loss(config, params, recipe, hidden, scores, words, law)
            total += recipe.selector_weight * jnp.mean(jnp.sum(extra * weight, axis=-1))
            metrics |= more
        return total, metrics

    return loss


def _selector_loss(config, params, recipe, hidden, scores, words, law):
    """Per-column cross-entropy over the shortlist, given the true predecessor."""
    labels = words[:, 1:]
    # A padded row's -inf must not enter the energies' gradient.
    unary, candidates = stable_top_k(jnp.maximum(scores, -1e9), config.selector_top_k)
    inside = jnp.any(candidates == labels[..., None], axis=-1)
    if recipe.outside == "replace":
        gold = jnp.take_along_axis(scores, labels[..., None], axis=-1)
        keep = inside[..., None] | (jnp.arange(config.selector_top_k) < config.selector_top_k - 1)
        candidates = jnp.where(keep, candidates, labels[..., None])
        unary = jnp.where(keep, unary, gold)
    projected, predecessor, successor = DraftModel(config).apply(
        {"params": params}, hidden, method="select"
    )
    gated = predecessor[words[:, :-1]] * projected
    energy = unary + jnp.einsum("bkr,bkcr->bkc", gated, successor[candidates])
    mass = jnp.take_along_axis(law, candidates, axis=-1)
    share = mass / jnp.maximum(jnp.sum(mass, axis=-1, keepdims=True), 1e-9)
    loss = -jnp.sum(share * jax.nn.log_softmax(energy), axis=-1)
    if recipe.outside == "skip":
        loss = jnp.where(inside, loss, 0.0)
    chosen = jnp.take_along_axis(candidates, jnp.argmax(energy, -1)[..., None], axis=-1)[..., 0]
    metrics = {
        "selector_loss": jnp.mean(loss),
        "selector_accuracy": jnp.mean((chosen == labels) & inside),
        "recall": jnp.mean(inside),
        "shortlist_mass": jnp.mean(jnp.sum(mass, axis=-1)),
    }
    return loss, metrics
