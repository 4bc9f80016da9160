"""The checks of `experiments.certify`: laws in closed form, chi-square, greedy equality."""

import concurrent.futures
import functools
from collections.abc import Callable

import jax
import numpy as np
import scipy.stats

from dflash_jax import Pair, Sampling, generate
from dflash_jax.decoding.certificate import Enumerator, Subject, sampled_sequences
from dflash_jax.decoding.generate import plan
from dflash_jax.target.model import TargetModel
from dflash_jax.training.target import hidden_states
from experiments.configs.toy import make_toy
from experiments.target_law import next_token_law, sequence_law

EXACT = 1e-6  # the largest difference of two probabilities; float32 laws of a few factors
SIGNIFICANCE = 0.01  # after Bonferroni's correction

# vocabulary, K, published tokens: P takes every value 0..min(K, length - 2).
SIZES = [(4, 3, 5), (7, 2, 4), (12, 1, 3)]
CONTROLS = [
    Sampling(1.0),
    Sampling(0.7, top_k=3, top_p=0.85),
    Sampling(1.3, min_p=0.05, presence_penalty=0.6, frequency_penalty=0.3),
    Sampling(0.9, 3, 0.95, 0.02, 0.4, -0.2, 1.4),
    Sampling(0.0, presence_penalty=0.8, repetition_penalty=1.2),
]


@functools.partial(jax.jit, static_argnums=0)
def _logits_at(config, params, rows, last):
    hidden = hidden_states(config, params, rows).hidden
    here = jax.lax.dynamic_index_in_dim(hidden, last, axis=1, keepdims=False)
    return TargetModel(config).apply({"params": params}, here, method="logits")


def logits_after(subject: Subject, rows: int, length: int):
    """Next-token logits of whole token rows, by one forward over each: no cache, no rounds.

    Args:
      rows, length: the most there will be; padded to them, everything is compiled once.
    """
    spec, params = subject.spec, subject.weights.target

    def after(tokens: np.ndarray) -> np.ndarray:
        padded = np.zeros((rows, length), np.int32)
        padded[: len(tokens), : tokens.shape[1]] = tokens
        return np.asarray(_logits_at(spec.target, params, padded, tokens.shape[1] - 1))[
            : len(tokens)
        ]

    return after


def chain_law(subject: Subject, sampling: Sampling, length: int) -> np.ndarray:
    """The target's own law of the next `length` tokens."""
    vocabulary, prompt = subject.spec.public_vocab, subject.prompt
    after = logits_after(subject, vocabulary ** (length - 1), len(prompt) + length)
    return sequence_law(after, vocabulary, prompt, sampling, length)


def describe(sampling: Sampling) -> str:
    changed = {k: v for k, v in vars(sampling).items() if v != getattr(Sampling(), k)}
    return ", ".join(f"{k} {v}" for k, v in changed.items()) or "greedy"


def p_value(observed: np.ndarray, law: np.ndarray) -> float:
    """Chi-square goodness of fit; cells of fewer than 5 expected are pooled into one.

    An outcome that the law gives no mass at all has p-value 0.
    """
    if observed[law == 0].any():
        return 0.0
    expected = law * observed.sum()
    large = expected >= 5
    cells = [*zip(observed[large], expected[large], strict=True)]
    rest = expected[~large].sum()
    if rest > 0:
        cells.append((observed[~large].sum(), rest))
    seen, wanted = np.array(cells, np.float64).T
    if len(cells) < 2:
        return 1.0
    statistic = ((seen - wanted) ** 2 / np.maximum(wanted, 1e-12)).sum()
    return float(scipy.stats.chi2.sf(statistic, len(cells) - 1))


def at_once(*calls: Callable[[], list[dict]]) -> list[dict]:
    """Checks of independent calls, in their order; two run at a time.

    Nearly all of the time goes into compilation, which leaves Python's lock alone.
    """
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = [pool.submit(call) for call in calls]
        return [check for future in running for check in future.result()]


def certify_toys(sizes, controls, trials: int, seed: int) -> list[dict]:
    """Closed form for every setting; chi-square of the compiled loop for two of the first size."""
    return at_once(
        *(
            functools.partial(
                certify_toy, make_toy(vocabulary, dflash2, draft_tokens, seed), length, controls,
                trials if vocabulary == sizes[0][0] else 0,
            )
            for vocabulary, draft_tokens, length in sizes
            for dflash2 in (False, True)
        )
    )  # fmt: skip


def certify_toy(subject: Subject, length: int, controls, trials: int) -> list[dict]:
    spec, checks = subject.spec, []
    enumerator = Enumerator(subject)
    for index, sampling in enumerate(controls):
        law = chain_law(subject, sampling, length)
        label = dict(
            draft=spec.draft.name, vocabulary=spec.public_vocab,
            draft_tokens=spec.draft_tokens, length=length, sampling=describe(sampling),
        )  # fmt: skip
        difference = float(np.abs(enumerator.law(sampling, length) - law).max())
        checks.append(
            {"check": "closed form", **label, "difference": difference,
             "passed": difference <= EXACT}
        )  # fmt: skip
        if trials and index in (0, 3):
            observed = sample_toy(subject, sampling, length, trials)
            checks.append(
                {"check": "samples", **label, "trials": trials,
                 "p": p_value(observed.reshape(-1), law.reshape(-1))}
            )  # fmt: skip
    return checks


def sample_toy(subject: Subject, sampling: Sampling, length: int, trials: int) -> np.ndarray:
    """Counts of emitted sequences over `trials` seeds, `[V] * length`."""
    shape = (subject.spec.public_vocab,) * length
    tokens = sampled_sequences(subject, sampling, length, np.arange(trials), rows=2048)
    index = np.ravel_multi_index(tokens.T, shape)
    return np.bincount(index, minlength=np.prod(shape)).reshape(shape)


def certify_samples(pair: Pair, name: str, prompt: list[int], trials: int) -> list[dict]:
    """Chi-square of the token after the first, and of three tokens under filters."""
    # Of four tokens a block can hold two proposals that are verified: wider ones cost only time.
    subject = Subject(*plan(pair, 3), tuple(prompt))
    logits, checks = logits_after(subject, 1, len(prompt) + 3), []
    public = pair.public_vocab

    def law_after(tokens, sampling):
        scores = logits(np.array([[*prompt, *tokens]]))[0, :public]
        return next_token_law(scores, sampling, prompt, tokens)

    def sample(sampling):
        return sampled_sequences(subject, sampling, 4, np.arange(trials), rows=64)[:, :3]

    free = Sampling(1.0)
    tokens = sample(free)
    first = int(np.bincount(tokens[:, 0]).argmax())
    after = tokens[tokens[:, 0] == first, 1]
    for label, seen, given in (("first token", tokens[:, 0], []), ("next token", after, [first])):
        observed = np.bincount(seen, minlength=public)
        p = p_value(observed, law_after(given, free))
        checks.append(
            {"check": label, "draft": name, "sampling": describe(free), "trials": len(seen), "p": p}
        )

    filtered = Sampling(1.0, top_k=4, repetition_penalty=1.1)
    sequences = {(): 1.0}
    for _ in range(3):
        sequences = {
            (*given, int(token)): mass * law[token]
            for given, mass in sequences.items()
            for law in [law_after(given, filtered)]
            for token in np.flatnonzero(law)
        }
    seen = {sequence: 0 for sequence in sequences}
    for row in sample(filtered).tolist():
        seen[tuple(row)] = seen.get(tuple(row), 0) + 1  # outside the support: p = 0
    laws = np.array([sequences.get(sequence, 0.0) for sequence in seen])
    checks.append(
        {"check": "three tokens", "draft": name, "sampling": describe(filtered), "trials": trials,
         "p": p_value(np.array(list(seen.values())), laws)}
    )  # fmt: skip
    return checks


def certify_greedy(pair: Pair, name: str, plain, prompts) -> list[dict]:
    """Tokens of plain greedy decoding that a draft changed."""
    results = generate(pair, prompts, draft_tokens=7, max_new_tokens=96, ignore_eos=True)
    differing = sum(
        a != b
        for result, expected in zip(results, plain, strict=True)
        for a, b in zip(result.tokens, expected.tokens, strict=True)
    )
    return [{"check": "greedy", "draft": name, "tokens": 96 * len(prompts), "differing": differing,
             "passed": differing == 0}]  # fmt: skip


def correct_and_judge(checks: list[dict]) -> bool:
    """Bonferroni over all p-values; fills in `passed`."""
    tests = [check for check in checks if "p" in check]
    for check in tests:
        check["corrected_p"] = min(1.0, check["p"] * len(tests))
        check["passed"] = check["corrected_p"] >= SIGNIFICANCE
    return all(check["passed"] for check in checks)
