"""What a draft learns from: the target's own continuations of corpus prompts."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from rich import progress

from dflash_jax.config import TargetConfig
from dflash_jax.decoding.distribution import Sampling, make_controls
from dflash_jax.decoding.loop import PREFILL_CHUNK, decode, prefill_prompts
from dflash_jax.decoding.spec import Spec, Weights
from dflash_jax.state.sequence import init_sequences
from dflash_jax.training.corpus import windows
from dflash_jax.typing import Params


def make_continuations(
    config: TargetConfig,
    params: Params,
    stream: np.ndarray,
    *,
    sequences: int,
    prompt: int = PREFILL_CHUNK,
    length: int = 256,
    rows: int = 64,
    public_vocab: int,
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Continues windows of `stream` to `length` tokens, half greedily, half at temperature 1.

    Args:
      stream: corpus tokens to take prompts from.
      prompt: tokens taken from the corpus, a multiple of the prefill chunk.
      rows: sequences decoded at once.

    Returns:
      tokens `[sequences, length]` int32 (prompt included) and greedy `[sequences]` bool.

    Raises:
      ValueError: `prompt` is not whole chunks, or `length` leaves nothing to continue.
    """
    if prompt < 1 or prompt % PREFILL_CHUNK:
        raise ValueError(f"prompt: got {prompt}, expected a multiple of {PREFILL_CHUNK}")
    if length <= prompt:
        raise ValueError(f"length: got {length}, expected more than the prompt's {prompt}")
    spec = Spec(config, None, 0, public_vocab)
    new = length - prompt
    # Even rows are greedy, odd ones sampled: both kinds in every batch, one compile.
    greedy = np.arange(rows) % 2 == 0
    # No stop ids: an end-of-text token is text like any other here.
    controls = make_controls([Sampling(0.0 if row else 1.0) for row in greedy])
    batches = -(-sequences // rows)
    done = []
    for batch in progress.track(range(batches), description="continuations"):
        prompts = windows(stream, prompt, rows, seed, batch)
        first = seed * 1_000_003 + batch * rows
        seeds = jnp.arange(rows, dtype=jnp.uint32) + np.uint32(first % 2**32)
        state = init_sequences(config, None, seeds, length + 1, 1, jnp.float32)
        weights = Weights(params, None)
        lengths = jnp.full(rows, prompt, jnp.int32)
        state = prefill_prompts(spec, weights, state, jnp.asarray(prompts), lengths, controls)
        budget = jnp.full(rows, new, jnp.int32)
        _, result = decode(spec, new, weights, state, controls, budget)
        done.append(np.concatenate([prompts, jax.device_get(result.tokens)], axis=1))
    return np.concatenate(done)[:sequences], np.tile(greedy, batches)[:sequences]


def load_or_make(path: pathlib.Path, make) -> tuple[np.ndarray, np.ndarray]:
    """Reads `path`, or calls `make` and writes it, whole or not at all."""
    if path.is_file():
        with np.load(path) as saved:
            return saved["tokens"], saved["greedy"]
    path.parent.mkdir(parents=True, exist_ok=True)  # before the work, not after it
    tokens, greedy = make()
    partial = path.with_suffix(".partial.npz")
    np.savez_compressed(partial, tokens=tokens, greedy=greedy)
    partial.rename(path)
    return tokens, greedy
