"""What the law should be, in plain NumPy float64: the oracle of the exactness certificate.

Written from the definitions, token by token; it shares no code with the functions it checks.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from dflash_jax import Sampling


def next_token_law(
    logits: Sequence[float],
    sampling: Sampling,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> np.ndarray:
    """Law of the next token after `prompt + output`, from its public logits."""
    logits = np.array(logits, np.float64)
    for token in range(len(logits)):
        if token in prompt or token in output:
            factor = sampling.repetition_penalty
            logits[token] *= factor if logits[token] <= 0 else 1 / factor
        count = list(output).count(token)
        if count:
            logits[token] -= sampling.presence_penalty + count * sampling.frequency_penalty
    if sampling.temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    law = np.exp((logits - logits.max()) / sampling.temperature)
    ranked = sorted(range(len(law)), key=lambda token: (-logits[token], token))
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    total, before, kept = law[ranked].sum(), 0.0, []
    for token in ranked:
        if sampling.top_p < 1 and kept and before >= sampling.top_p:
            break
        kept.append(token)
        before += law[token] / total
    kept = [token for token in kept if law[token] >= sampling.min_p * law[ranked[0]]]
    filtered = np.zeros_like(law)
    filtered[kept] = law[kept]
    return filtered / filtered.sum()


def sequence_law(
    logits_after: Callable[[np.ndarray], np.ndarray],
    public_vocab: int,
    prompt: Sequence[int],
    sampling: Sampling,
    length: int,
) -> np.ndarray:
    """Law of the next `length` tokens, `[V] * length`: the chain rule and nothing else.

    Args:
      logits_after: `[N, T]` token rows -> `[N, >= V]` next-token logits of each row.
    """
    law = np.ones(1)
    for level in range(length):
        outputs = list(itertools.product(range(public_vocab), repeat=level))
        rows = np.array([[*prompt, *output] for output in outputs])
        logits = np.asarray(logits_after(rows))[:, :public_vocab]
        steps = [
            next_token_law(row, sampling, prompt, output)
            for row, output in zip(logits, outputs, strict=True)
        ]
        law = (law[:, None] * np.stack(steps)).reshape(-1)
    return law.reshape((public_vocab,) * length)
