"""Greedy speculative text equals plain greedy text, token for token, on the embedded pair.

64 held-out prompts of 1 to 700 tokens, 128 tokens each, float32: plain decoding against trained,
untrained and adversarial drafts, for every width and batch size. Prompts and texts are longer
than the drafts' windows, so the rings wrap. Where two correct computations of a logit differ in
their last bits an exact tie may fall either way: a differing token passes only if the two logits
differ by less than 1e-5, and is printed.

To save time, the trained drafts are run over all 64 prompts at K = 7, B = 8, and a selection of the
other cases (`SHORT`) over every fourth prompt. `--all-prompts` runs everything everywhere.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Pair, generate, load_pair
from dflash_jax.state.sequence import init_cache
from dflash_jax.target.model import TargetModel
from dflash_jax.training import draft as draft_training
from experiments.prompts import held_out_prompts

PROMPTS, LONGEST, NEW = 64, 700, 128
TIE = 1e-5
WIDTHS, BATCHES = (1, 3, 7, 15), (1, 3, 8)
DRAFTS = ("dflash", "dflash2", "random", "adversarial")
# The short selection: every width of the trained drafts at B = 8, and of the others each width at
# some batch size. Trained and spoilt DFlash2 drafts share the programs of a (width, batch size),
# whose compilation is most of the time: the selection has one such pair at B = 1 and one at B = 3.
SHORT = {
    *((kind, width, 8) for kind in ("dflash", "dflash2") for width in WIDTHS),
    *(("random", 1, 8), ("random", 15, 8), ("adversarial", 1, 8), ("adversarial", 15, 8)),
    *(("dflash2", 7, 1), ("random", 7, 1), ("adversarial", 7, 1)),
    *(("dflash2", 3, 3), ("random", 3, 3), ("adversarial", 3, 3)),
}

pytestmark = pytest.mark.slow


@functools.cache
def pair_for(kind: str | None) -> Pair:
    if kind is None or kind.startswith("dflash"):
        return load_pair("tiny", kind and f"tiny-{kind}")
    trained = pair_for("dflash2")
    if kind == "random":
        params = draft_training.init_params(trained.draft, seed=5)
    else:
        # The head sees the negated hidden columns: it proposes what the draft believes least.
        params = dict(trained.draft_params)
        params["norm"] = {"weight": -params["norm"]["weight"]}
    return dataclasses.replace(trained, draft_params=params)


@functools.cache
def prompts() -> list[list[int]]:
    """64 held-out prompts whose lengths sweep 1 to 700 tokens."""
    lengths = np.unique(np.round(np.geomspace(1, LONGEST, PROMPTS)).astype(int))
    lengths = np.concatenate([lengths, np.arange(256 - 8, 256 + 8)])  # around the window
    lengths = np.resize(lengths, PROMPTS)
    whole = held_out_prompts(pair_for(None).tokenizer, PROMPTS, LONGEST)
    return [prompt[:length] for prompt, length in zip(whole, lengths, strict=True)]


def run(pair: Pair, draft_tokens: int, rows: int, indices: range):
    """Results of these prompts, `rows` at a time; batches are ragged."""
    results = []
    for start in range(0, len(indices), rows):
        batch = [prompts()[index] for index in indices[start : start + rows]]
        filled = batch + batch[:1] * (rows - len(batch))  # the last batch keeps the compiled shape
        results += generate(
            pair,
            filled,
            draft_tokens=draft_tokens,
            max_new_tokens=NEW,
            ignore_eos=True,
            max_context=LONGEST + NEW,  # one compilation of each (width, batch size)
        )[: len(batch)]
    return results


@functools.cache
def plain() -> list[list[int]]:
    return [result.tokens for result in run(pair_for(None), 0, 8, range(PROMPTS))]


def chosen(config, kind: str | None, draft_tokens: int, rows: int) -> range:
    """Indices of the prompts that a case runs."""
    usual = kind is not None and kind.startswith("dflash") and (draft_tokens, rows) == (7, 8)
    every = 1 if usual or config.getoption("--all-prompts") else 4
    return range(0, PROMPTS, every)


@functools.cache
def _score():
    pair = pair_for(None)
    model = TargetModel(pair.target)

    @jax.jit
    def score(tokens, length):
        cache = init_cache(pair.target, 1, 0, 1, jnp.float32)
        block = model.apply(
            {"params": pair.target_params}, tokens, jnp.zeros(1, jnp.int32), length, cache
        )
        last = block.hidden[:, length[0] - 1]
        return model.apply({"params": pair.target_params}, last, method="logits")[0]

    return score


def logit_gap(tokens: list[int], a: int, b: int) -> float:
    """Difference of two next-token logits after `tokens`, from one forward of the whole text."""
    padded = np.zeros((1, 1024), np.int32)
    padded[0, : len(tokens)] = tokens
    logits = _score()(padded, jnp.asarray([len(tokens)], jnp.int32))
    return abs(float(logits[a] - logits[b]))


def assert_same_text(results, indices: range, label: str) -> None:
    for index, result in zip(indices, results, strict=True):
        expected = plain()[index]
        if result.tokens == expected:
            continue
        at = next(i for i, (a, b) in enumerate(zip(result.tokens, expected, strict=True)) if a != b)
        got, want = result.tokens[at], expected[at]
        gap = logit_gap(prompts()[index] + expected[:at], got, want)
        print(f"{label}: prompt {index}, token {at}: {got} for {want}, logits differ by {gap:.1e}")
        assert gap < TIE, f"{label}: prompt {index}, token {at}: {got}, plain has {want}"


@pytest.mark.parametrize("rows", (1, 3))
def test_plain_does_not_depend_on_the_batch(rows, pytestconfig):
    indices = chosen(pytestconfig, None, 0, rows)
    assert_same_text(run(pair_for(None), 0, rows, indices), indices, f"plain, B = {rows}")


def pytest_generate_tests(metafunc):
    if "draft_tokens" not in metafunc.fixturenames:
        return
    everything = metafunc.config.getoption("--all-prompts")
    cases = [
        case for case in itertools.product(DRAFTS, WIDTHS, BATCHES) if everything or case in SHORT
    ]
    metafunc.parametrize(("kind", "draft_tokens", "rows"), cases)


def test_speculative_text_equals_plain(kind, draft_tokens, rows, pytestconfig):
    indices = chosen(pytestconfig, kind, draft_tokens, rows)
    results = run(pair_for(kind), draft_tokens, rows, indices)
    assert_same_text(results, indices, f"{kind}, K = {draft_tokens}, B = {rows}")
    rounds = [r for result in results for r in result.rounds]
    assert sum(r.committed for r in rounds) == len(indices) * (NEW - 1)
    if kind == "adversarial":
        assert max(r.accepted for r in rounds) == 0
    if kind.startswith("dflash"):
        assert np.mean([r.accepted for r in rounds]) > 0.3  # the draft really drafts
