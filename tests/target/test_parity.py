"""The target against outputs of Hugging Face transformers, chunk by chunk and step by step.

Both prompts run as two rows of one batch, so that every comparison is also one of ragged rows.

Both sides are also held against the same stack in float64 (`tests/target/float64.py`), which says
whose a difference is. Largest errors of float32, measured on a CPU with AVX-512:

                        |entry| up to   ours      transformers   ours - transformers
    residual, untied    13              5.7e-5    5.5e-5         8.3e-5
    residual, tied      14              1.2e-4    1.2e-4         1.4e-4
    GDN states, tied    2.6             5.7e-6    2.7e-5         3.1e-5
    logits, tied        38              3.5e-4    4.8e-4         6.1e-4

One token of the tied target's short prompt is badly conditioned: there the stored reference is
off by 1.2e-4 (ours 3.2e-5, and 1.1e-4 when compiled without fused multiply-add), and with it the
states after it. So 1e-4 for hidden and 2e-5 for states, what two correct implementations show
elsewhere, are too narrow there, and it is the reference that needs the room.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.state.gdn import GDNState, fold
from dflash_jax.state.paged import append
from dflash_jax.state.sequence import TargetCache, init_cache
from dflash_jax.target.model import TargetModel
from tests.target import float64

# Largest error of a GDN state, and of a logit by (tied head or not), against float64.
STATE, LOGITS = 3e-5, {True: 1e-3, False: 3e-4}
TARGETS, PROMPTS = ("dense_text", "dense_text_tied"), ("short", "long")
PAGE, CHUNK = 16, 64
JUNK = 3  # token of dead columns


def check(tolerance, got, wanted, exact, where=""):
    """Ours and the reference's are both within `tolerance` of float64."""
    for side, value in (("ours", got), ("reference", wanted)):
        error = np.abs(np.asarray(value, np.float64) - exact)
        at = np.unravel_index(error.argmax(), error.shape)
        assert error.max() <= tolerance, f"{where}: {side} is off by {error.max():.1e} at {at}"


def check_hidden(got, wanted, exact, where=""):
    """1e-4 where entries are below 8; the residual stream grows beyond, its roundings with it.

    One token, badly conditioned, may be off by 4e-4: which one it is depends on the CPU. (The
    chunked and the step-by-step rule of this very code once differed by 3e-4 in one of 150.)
    """
    for side, value in (("ours", got), ("reference", wanted)):
        error = np.abs(np.asarray(value, np.float64) - exact)
        at = np.unravel_index(error.argmax(), error.shape)
        worst = f"{where}: {side} is off by {error.max():.1e} at {at}"
        of_token = np.sort(error.reshape(len(error), -1).max(axis=1))
        size = max(1.0, np.abs(exact).max() / 8)
        assert of_token[:-1].max(initial=0.0) <= 1e-4 * size, worst
        assert of_token[-1] <= 4e-4, worst


@functools.cache
def compiled(config):
    """`(forward, commit)` of a stack; tied and untied targets of one geometry share them."""
    model = TargetModel(config)
    taps = tuple(range(config.num_hidden_layers))

    @functools.partial(jax.jit, static_argnames="record")
    def forward(params, tokens, lengths, live, cache, record):
        return model.apply(
            {"params": params}, tokens, lengths, live, cache, tap_ids=taps, record=record
        )

    @jax.jit
    def commit(cache, block, lengths, count):
        kv = append(cache.kv, block.key, block.value, lengths, count)
        chunked = isinstance(block.gdn, GDNState)
        return TargetCache(kv, block.gdn if chunked else fold(cache.gdn, block.gdn, count))

    return forward, commit


class Prefilled(NamedTuple):
    """Per row: hidden `[T, H]`, taps `[layers, T, H]`, logits `[T, V]`; and the state after."""

    hidden: list[np.ndarray]
    taps: list[np.ndarray]
    logits: list[np.ndarray]
    cache: Any


class Runner:
    """A target with two rows; state in, state out."""

    def __init__(self, checkpoint):
        self.config, self.params, oracle = self._checkpoint = checkpoint
        self._forward, self.commit = compiled(
            dataclasses.replace(self.config, tie_word_embeddings=True)
        )
        self.prompts = [oracle[f"{prompt}.input_ids"][0] for prompt in PROMPTS]
        self.lengths = np.array([len(ids) for ids in self.prompts], np.int32)

    @property
    def empty(self):
        return init_cache(self.config, 2, max(self.lengths) + 64, PAGE, jnp.float32)

    @functools.cached_property
    def exact(self):
        """Float64 forwards of both prompts with the tokens that the block adds."""
        config, params, oracle = self._checkpoint
        found = []
        for ids, prompt in zip(self.prompts, PROMPTS, strict=True):
            extra = oracle[f"{prompt}.extra_ids"][0]
            steps = oracle[f"{prompt}.decode.logits"].shape[1]
            lengths = [len(ids), len(ids) + steps, len(ids) + len(extra)]
            found.append(float64.forward(config, params, [*ids, *extra], lengths))
        return found

    def forward(self, tokens, lengths, live, cache, record):
        args = (np.asarray(x, np.int32) for x in (tokens, lengths, live))
        return self._forward({"model": self.params["model"]}, *args, cache, record=record)

    def logits(self, hidden):
        return np.asarray(
            TargetModel(self.config).apply({"params": self.params}, hidden, method="logits")
        )

    def taps(self, block, row, live):
        """`[layers, live, H]`."""
        taps = np.asarray(block.taps)[row, :live]
        shape = (live, self.config.num_hidden_layers, self.config.hidden_size)
        return np.moveaxis(taps.reshape(shape), 1, 0)

    def step(self, tokens, lengths, live, cache):
        """Plain decoding: a verify of one column, committed whole."""
        block = self.forward(np.reshape(tokens, (2, 1)), lengths, live, cache, record=True)
        cache = self.commit(cache, block, jnp.asarray(lengths), jnp.asarray(live))
        return self.logits(block.hidden[:, 0]), cache

    def prefill(self, chunk, prompts=None):
        """All of both prompts, in chunks whose dead columns hold junk."""
        prompts = self.prompts if prompts is None else prompts
        cache, parts = self.empty, ([], [])
        for start in range(0, max(map(len, prompts)), chunk):
            tokens = np.full((2, chunk), JUNK)
            pieces = [ids[start : start + chunk] for ids in prompts]
            for row, piece in enumerate(pieces):
                tokens[row, : len(piece)] = piece
            live = np.array([len(piece) for piece in pieces], np.int32)
            # A row that is done stays where it is.
            lengths = np.array([min(start, len(ids)) for ids in prompts], np.int32)
            block = self.forward(tokens, lengths, live, cache, record=False)
            cache = self.commit(cache, block, lengths, live)
            for row in range(2):
                hidden = np.asarray(block.hidden)[row, : live[row]]
                parts[row].append((hidden, self.taps(block, row, live[row])))
        hidden = [np.concatenate([h for h, _ in row]) for row in parts]
        taps = [np.concatenate([t for _, t in row], axis=1) for row in parts]
        return Prefilled(hidden, taps, [self.logits(jnp.asarray(h)) for h in hidden], cache)


@pytest.fixture(scope="module")
def runner(load_target):
    return functools.cache(lambda name: Runner(load_target(name)))


@pytest.fixture(scope="module")
def prefilled(runner):
    return functools.cache(lambda name: runner(name).prefill(CHUNK))


def check_cache(config, cache, row, oracle, prefix, length, exact):
    """Committed state of a row against the reference's cache of `length` positions."""
    for index, layer in enumerate(config.linear_layers):
        where = f"{prefix}.layer{layer}"
        ours, wanted = cache.gdn.recurrent[index, row], oracle[f"{where}.recurrent"][0]
        check(STATE, ours, wanted, exact.states[layer, length], f"{where}.recurrent")
        # The reference keeps one column more than the history needs.
        history, wanted = cache.gdn.conv[index, row], oracle[f"{where}.conv"][0].T[1:]
        columns = exact.columns[layer][:length][-len(wanted) :]
        check_hidden(history, wanted, columns, f"{where}.conv")
    pages = np.asarray(cache.kv.block_table)[row]
    for index, layer in enumerate(config.full_layers):
        for name, pool, truth in (
            ("key", cache.kv.key, exact.keys),
            ("value", cache.kv.value, exact.values),
        ):
            wanted = oracle[f"{prefix}.layer{layer}.{name}"][0].swapaxes(0, 1)
            assert len(wanted) == length
            stored = np.asarray(pool[index])[pages].reshape(-1, *wanted.shape[1:])[:length]
            check_hidden(stored, wanted, truth[layer][:length], f"{prefix}.layer{layer}.{name}")


def check_prefill(checkpoint, result, run):
    config, _, oracle = checkpoint
    for row, prompt in enumerate(PROMPTS):
        length, exact = run.lengths[row], run.exact[row]
        for layer in range(config.num_hidden_layers):
            # The last one is before the final norm.
            wanted = oracle[f"{prompt}.prefill.hidden{layer + 1}"][0]
            residual = exact.residual[layer, :length]
            check_hidden(result.taps[row][layer], wanted, residual, f"{prompt}, block {layer}")
        wanted = oracle[f"{prompt}.prefill.final_norm"][0]
        check_hidden(result.hidden[row], wanted, exact.hidden[:length], prompt)
        wanted = oracle[f"{prompt}.prefill.logits"][0]
        tolerance = LOGITS[config.tie_word_embeddings]
        check(tolerance, result.logits[row], wanted, exact.logits[:length], prompt)
        check_cache(config, result.cache, row, oracle, f"{prompt}.prefill", length, exact)


@pytest.mark.parametrize("name", TARGETS)
class TestTarget:
    def test_prefill(self, load_target, runner, prefilled, name):
        config, params, oracle = load_target(name)
        ids = jnp.asarray(oracle["long.input_ids"], jnp.int32)
        embedded = TargetModel(config).apply({"params": params}, ids, method="embed")
        np.testing.assert_array_equal(embedded, oracle["long.prefill.hidden0"])
        check_prefill(load_target(name), prefilled(name), runner(name))

    def test_block_and_its_commit(self, load_target, runner, prefilled, name):
        config, _, oracle = load_target(name)
        run, cache = runner(name), prefilled(name).cache
        extra = np.concatenate([oracle[f"{prompt}.extra_ids"] for prompt in PROMPTS])
        width = extra.shape[1]
        steps = oracle["short.decode.logits"].shape[1]
        block = run.forward(extra, run.lengths, [width, width], cache, record=True)
        # All of it committed, and only its first columns.
        commits = {
            prefix: run.commit(cache, block, run.lengths, np.full(2, count, np.int32))
            for prefix, count in (("block_end", width), ("decode_end", steps))
        }
        logits, exact = run.logits(block.hidden), run.exact
        tolerance = LOGITS[config.tie_word_embeddings]
        block_at = [slice(length, length + width) for length in run.lengths]
        for row, prompt in enumerate(PROMPTS):
            taps = run.taps(block, row, width)
            for layer in range(config.num_hidden_layers - 1):
                wanted = oracle[f"{prompt}.block.hidden{layer + 1}"][0]
                residual = exact[row].residual[layer, block_at[row]]
                check_hidden(taps[layer], wanted, residual, f"{prompt}, block {layer}")
            wanted = oracle[f"{prompt}.block.logits"][0]
            check(tolerance, logits[row], wanted, exact[row].logits[block_at[row]], prompt)
            for prefix, count in (("block_end", width), ("decode_end", steps)):
                length = run.lengths[row] + count
                where = f"{prompt}.{prefix}"
                check_cache(config, commits[prefix], row, oracle, where, length, exact[row])

    def test_plain_steps(self, load_target, runner, prefilled, name):
        config, _, oracle = load_target(name)
        run, cache = runner(name), prefilled(name).cache
        wanted = np.concatenate([oracle[f"{prompt}.decode.logits"] for prompt in PROMPTS])
        extra = np.concatenate([oracle[f"{prompt}.extra_ids"] for prompt in PROMPTS])
        live, exact = np.ones(2, np.int32), run.exact
        tolerance = LOGITS[config.tie_word_embeddings]
        for step in range(wanted.shape[1]):
            logits, cache = run.step(extra[:, step], run.lengths + step, live, cache)
            truth = [exact[row].logits[run.lengths[row] + step] for row in range(2)]
            check(tolerance, logits, wanted[:, step], np.stack(truth), f"step {step}")
        for row, prompt in enumerate(PROMPTS):
            length = run.lengths[row] + wanted.shape[1]
            check_cache(config, cache, row, oracle, f"{prompt}.decode_end", length, exact[row])

    def test_greedy_ids(self, load_target, runner, prefilled, name):
        # The second row sits out: no live column, and its state keeps every bit.
        oracle = load_target(name).oracle
        run, result = runner(name), prefilled(name)
        output = oracle["greedy.output_ids"][0]
        np.testing.assert_array_equal(output[: run.lengths[0]], run.prompts[0])
        token, cache, ids = int(np.argmax(result.logits[0][-1])), result.cache, []
        lengths = run.lengths.copy()
        while len(ids) < len(output) - run.lengths[0]:
            ids.append(token)
            logits, cache = run.step([token, JUNK], lengths, np.array([1, 0], np.int32), cache)
            token = int(np.argmax(logits[0]))
            lengths[0] += 1
        np.testing.assert_array_equal(ids, output[run.lengths[0] :])
        for before, after in zip(result.cache.gdn, cache.gdn, strict=True):
            assert np.asarray(before)[:, 1].tobytes() == np.asarray(after)[:, 1].tobytes()

    def test_padded_batch(self, load_target, runner, name):
        # The reference pads on the left; here rows are padded on the right, with junk.
        config, params, oracle = load_target(name)
        mask = oracle["padded.attention_mask"].astype(bool)
        prompts = [ids[on] for ids, on in zip(oracle["padded.input_ids"], mask, strict=True)]
        assert len({len(ids) for ids in prompts}) == 2
        result = runner(name).prefill(CHUNK, prompts)
        for row, on in enumerate(mask):
            exact = float64.forward(config, params, prompts[row], ()).logits
            wanted = oracle["padded.logits"][row, on]
            check(LOGITS[config.tie_word_embeddings], result.logits[row], wanted, exact, row)


@pytest.mark.parametrize("chunk", [1, 7, 32, 150])
def test_chunk_sizes(load_target, runner, chunk):
    """Everything a prefill leaves, features of early chunks included, whatever its chunks."""
    run = runner("dense_text")
    check_prefill(load_target("dense_text"), run.prefill(chunk), run)
