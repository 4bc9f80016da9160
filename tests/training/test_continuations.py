"""Continuations are the target's own: what `generate` would say to the same prompts."""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Pair, Sampling, generate
from dflash_jax.training.continuations import load_or_make, make_continuations
from dflash_jax.training.corpus import windows

PROMPT, LENGTH, ROWS, SEED = 64, 74, 4, 3


@pytest.fixture(scope="module")
def params(target_params):
    """The tiny target with a head so flat that sampled tokens show the temperature."""
    gain = jnp.full_like(target_params["model"]["norm"]["weight"], -0.7)  # 1 + w is applied
    return target_params | {"model": target_params["model"] | {"norm": {"weight": gain}}}


@pytest.fixture(scope="module")
def stream(target_config):
    return np.random.default_rng(0).integers(2, target_config.vocab_size, 900).astype(np.int32)


@pytest.fixture(scope="module")
def made(target_config, params, stream):
    """Six sequences, from one whole batch and half of another."""
    return make_continuations(
        target_config,
        params,
        stream,
        sequences=6,
        prompt=PROMPT,
        length=LENGTH,
        rows=ROWS,
        public_vocab=target_config.vocab_size,
        seed=SEED,
    )


@pytest.mark.parametrize("batch", [0, 1])
def test_continuations_equal_plain_generation(target_config, params, stream, made, batch):
    tokens, greedy = made
    assert tokens.shape == (6, LENGTH)
    assert greedy.tolist() == [True, False] * 3
    prompts = windows(stream, PROMPT, ROWS, SEED, batch)
    mine = tokens[batch * ROWS : (batch + 1) * ROWS]
    np.testing.assert_array_equal(mine[:, :PROMPT], prompts[: len(mine)])
    pair = Pair(target_config, params, None, None, None, "float32")
    results = generate(
        pair,
        prompts.tolist(),
        max_new_tokens=LENGTH - PROMPT,
        sampling=[Sampling(0.0), Sampling(1.0)] * 2,
        seed=[SEED * 1_000_003 + batch * ROWS + row for row in range(ROWS)],
        ignore_eos=True,
    )
    assert [row[PROMPT:].tolist() for row in mine] == [r.tokens for r in results[: len(mine)]]


def test_another_seed_takes_other_prompts(target_config, params, stream, made):
    tokens, _ = make_continuations(
        target_config,
        params,
        stream,
        sequences=4,
        prompt=PROMPT,
        length=LENGTH,
        rows=ROWS,
        public_vocab=target_config.vocab_size,
        seed=5_000,  # its request seeds exceed 32 bits
    )
    assert (tokens[:, :PROMPT] != made[0][:4, :PROMPT]).any(axis=1).all()


@pytest.mark.parametrize(
    ("prompt", "length", "message"),
    [
        (32, 74, "prompt: got 32, expected a multiple of 64"),
        (100, 128, "prompt: got 100, expected a multiple of 64"),
        (0, 74, "prompt: got 0, expected a multiple of 64"),
        (64, 64, "length: got 64, expected more than the prompt's 64"),
    ],
)
def test_lengths_that_do_not_fit(target_config, params, stream, prompt, length, message):
    with pytest.raises(ValueError, match=message):
        make_continuations(
            target_config,
            params,
            stream,
            sequences=1,
            prompt=prompt,
            length=length,
            public_vocab=48,
            seed=0,
        )


# --- the file ---


def data():
    return np.arange(6, dtype=np.int32).reshape(2, 3), np.asarray([True, False])


def never():
    raise AssertionError("made again")


def test_made_once_then_read(tmp_path):
    path = tmp_path / "new" / "data.npz"
    for make in (data, never):
        tokens, greedy = load_or_make(path, make)
        np.testing.assert_array_equal(tokens, data()[0])
        np.testing.assert_array_equal(greedy, data()[1])
        assert tokens.dtype == np.int32 and greedy.dtype == bool
    assert [p.name for p in path.parent.iterdir()] == ["data.npz"]


def test_interrupted_making_or_writing_leaves_no_file(tmp_path, monkeypatch):
    path = tmp_path / "data.npz"

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_or_make(path, interrupted)
    assert not path.exists()

    def torn(file, **arrays):
        file.write_bytes(b"PK half a file")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(np, "savez_compressed", torn)
        load_or_make(path, data)
    assert not path.exists()
    np.testing.assert_array_equal(load_or_make(path, data)[0], data()[0])
    np.testing.assert_array_equal(load_or_make(path, never)[0], data()[0])
