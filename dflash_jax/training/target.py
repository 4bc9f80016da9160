"""Next-token loss of the target, through the very forward that decodes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dflash_jax.config import TargetConfig
from dflash_jax.state.sequence import init_cache
from dflash_jax.target.model import TargetModel
from dflash_jax.training import corpus
from dflash_jax.typing import Array, Int, Params


def hidden_states(
    config: TargetConfig, params: Params, tokens: Int[Array, "B T"], tap_ids: tuple[int, ...] = ()
):
    """Forward over whole sequences from an empty cache; returns a `TargetBlock`."""
    rows, length = tokens.shape
    model = TargetModel(config)
    empty = init_cache(config, rows, 0, 1, jnp.float32)
    start, live = jnp.zeros(rows, jnp.int32), jnp.full(rows, length, jnp.int32)
    return model.apply({"params": params}, tokens, start, live, empty, tap_ids=tap_ids)


def next_token_loss(config: TargetConfig, params: Params, tokens: Int[Array, "B T"]):
    """Mean cross-entropy in nats of tokens 1.. given those before; `(loss, metrics)`."""
    hidden = hidden_states(config, params, tokens[:, :-1]).hidden
    logits = TargetModel(config).apply({"params": params}, hidden, method="logits")
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    hits = jnp.argmax(logits, -1) == tokens[:, 1:]
    return jnp.mean(losses), {"accuracy": jnp.mean(hits)}


def init_params(config: TargetConfig, seed: int) -> Params:
    """Fresh parameters; residual outputs start smaller by sqrt(2 L) so that depth is harmless."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    start, live = jnp.zeros(1, jnp.int32), jnp.full(1, 2, jnp.int32)
    model = TargetModel(config)

    def run(model):
        block = model(tokens, start, live, init_cache(config, 1, 0, 1, jnp.float32))
        return model.logits(block.hidden)

    params = jax.jit(lambda key: model.init(key, method=run))(jax.random.key(seed))["params"]
    shrink = (2 * config.num_hidden_layers) ** -0.5

    def scale(path, leaf):
        names = [part.key for part in path]
        return leaf * shrink if {"o_proj", "out_proj", "down_proj"} & set(names) else leaf

    return jax.tree_util.tree_map_with_path(scale, params)


def loss_function(config: TargetConfig):
    """`(params, tokens) -> (loss, metrics)` for `loop.make_step`."""
    return lambda params, tokens: next_token_loss(config, params, tokens)


def held_out_loss(config: TargetConfig, stream: np.ndarray, rows: int, length: int, batches: int):
    """`params -> {"held_out_loss", "held_out_accuracy"}` over fixed windows of `stream`."""
    compiled = jax.jit(loss_function(config))

    def evaluate(params: Params) -> dict[str, float]:
        losses, hits = [], []
        for index in range(batches):
            tokens = corpus.windows(stream, length + 1, rows, seed=1234, step=index)
            loss, metrics = compiled(params, tokens)
            losses.append(float(loss))
            hits.append(float(metrics["accuracy"]))
        return {
            "held_out_loss": float(np.mean(losses)),
            "held_out_accuracy": float(np.mean(hits)),
        }

    return evaluate
