"""Gated full attention: where its weights' rows go, and all of it in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.state.paged import PagedKV, append
from dflash_jax.target.attention import GatedAttention
from dflash_jax.target.positions import mrope_tables
from pallas_kernels.paged_attention import paged_attention


@pytest.fixture(scope="module")
def config(load_target):
    """Three query heads per key head; 8 of 24 dimensions rotated."""
    return dataclasses.replace(
        load_target("dense_text").config,
        hidden_size=20,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=24,
        partial_rotary_factor=1 / 3,
        mrope_section=(2, 1, 1),
        rope_theta=1e4,
        rms_norm_eps=1e-5,
    )


def random_params(config, rng):
    heads, kv_heads, dim = (
        config.num_attention_heads, config.num_key_value_heads, config.head_dim
    )  # fmt: skip

    def weight(*shape, std):
        return {"weight": rng.normal(scale=std, size=shape).astype(np.float32)}

    width = config.hidden_size
    return {
        "q_proj": weight(heads * dim * 2, width, std=width**-0.5),
        "k_proj": weight(kv_heads * dim, width, std=width**-0.5),
        "v_proj": weight(kv_heads * dim, width, std=width**-0.5),
        "o_proj": weight(width, heads * dim, std=(heads * dim) ** -0.5),
        "q_norm": weight(dim, std=0.3),
        "k_norm": weight(dim, std=0.3),
    }


def exact(config, params, x):
    """Causal self-attention of one sequence `[T, H]` in float64, head by head."""
    w = {name: np.float64(value["weight"]) for name, value in params.items()}
    tokens, dim = len(x), config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    half = config.rotary_dim // 2

    def norm(v, gain):
        return v / np.sqrt((v * v).mean() + config.rms_norm_eps) * (1 + gain)

    def rotate(v, position):
        angle = position * config.rope_theta ** (-2 * np.arange(half) / config.rotary_dim)
        out = v.copy()
        out[:half] = v[:half] * np.cos(angle) - v[half : 2 * half] * np.sin(angle)
        out[half : 2 * half] = v[half : 2 * half] * np.cos(angle) + v[:half] * np.sin(angle)
        return out

    x = np.float64(x)
    both = (x @ w["q_proj"].T).reshape(tokens, heads, 2, dim)
    key = (x @ w["k_proj"].T).reshape(tokens, kv_heads, dim)
    value = (x @ w["v_proj"].T).reshape(tokens, kv_heads, dim)
    mixed = np.zeros((tokens, heads, dim))
    for head in range(heads):
        group = head // (heads // kv_heads)
        keys = [rotate(norm(key[t, group], w["k_norm"]), t) for t in range(tokens)]
        for t in range(tokens):
            query, gate = both[t, head]
            query = rotate(norm(query, w["q_norm"]), t)
            scores = np.array([query @ keys[s] for s in range(t + 1)]) / np.sqrt(dim)
            weights = np.exp(scores - scores.max())
            output = weights / weights.sum() @ value[: t + 1, group]
            mixed[t, head] = output / (1 + np.exp(-gate))
    return mixed.reshape(tokens, -1) @ w["o_proj"].T


def run(config, params, x, pool, lengths, live):
    """A block of the module over pages; returns its output and its key and value."""
    positions = lengths[:, None] + jnp.arange(x.shape[1])

    def attend(query, key, value):
        return paged_attention(
            query, key, value, pool.key, pool.value, pool.block_table, lengths, live, layer=0
        )

    rotary = mrope_tables(config, positions)
    return GatedAttention(config).apply({"params": params}, x, rotary, attend)


def test_equals_float64(config, rng):
    # Two sequences in uneven chunks over pages of 4, one of them sitting out the second chunk.
    params = random_params(config, rng)
    sequences = rng.normal(size=(2, 11, config.hidden_size)).astype(np.float32)
    expected = [exact(config, params, x) for x in sequences]
    shape = (1, 6, 4, config.num_key_value_heads, config.head_dim)
    table = jnp.array([[5, 0, 3], [2, 4, 1]], jnp.int32)
    pool = PagedKV(jnp.full(shape, jnp.nan), jnp.full(shape, jnp.nan), table)
    step = jax.jit(run, static_argnums=0)
    lengths = np.zeros(2, np.int32)
    for counts in ([5, 1], [4, 0], [2, 5], [0, 5]):
        live = np.array(counts, np.int32)
        x = np.full((2, 5, config.hidden_size), np.nan, np.float32)
        for row, count in enumerate(counts):
            x[row, :count] = sequences[row, lengths[row] : lengths[row] + count]
        out, key, value = step(config, params, x, pool, lengths, live)
        pool = append(pool, key[None], value[None], lengths, live)
        for row, count in enumerate(counts):
            wanted = expected[row][lengths[row] : lengths[row] + count]
            # Some hundred products of numbers near 1 in float32.
            np.testing.assert_allclose(out[row, :count], wanted, rtol=1e-5, atol=1e-5)
        lengths += live


def test_q_proj_holds_query_and_gate_per_head(config):
    # Two heads of two dimensions; rows 0..7 of the projection say their own number.
    small = dataclasses.replace(
        config, hidden_size=4, num_attention_heads=2, num_key_value_heads=1, head_dim=2
    )
    labels = np.zeros((8, 4), np.float32)
    labels[:, 0] = np.arange(8)
    zero = np.zeros((2, 4), np.float32)
    params = {
        "q_proj": labels, "k_proj": zero, "v_proj": zero, "o_proj": np.eye(4, dtype=np.float32),
        "q_norm": np.zeros(2, np.float32), "k_norm": np.zeros(2, np.float32),
    }  # fmt: skip
    params = {name: {"weight": jnp.asarray(value)} for name, value in params.items()}
    seen = {}

    def attend(query, key, value):
        seen["query"] = np.asarray(query)
        return jnp.ones_like(query)

    x = jnp.zeros((1, 1, 4)).at[..., 0].set(1.0)
    quarter_turn = (jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1)))  # (a, b) -> (-b, a)
    out, _, _ = GatedAttention(small).apply({"params": params}, x, quarter_turn, attend)
    # Query rows {0, 1}, {4, 5}, normed and turned; gate rows {2, 3}, {6, 7}, neither.
    for head, (a, b) in enumerate([(0.0, 1.0), (4.0, 5.0)]):
        size = np.sqrt((a * a + b * b) / 2)
        np.testing.assert_allclose(seen["query"][0, 0, head], [-b / size, a / size], rtol=2e-5)
    gates = np.array([2.0, 3.0, 6.0, 7.0])
    np.testing.assert_allclose(out[0, 0], 1 / (1 + np.exp(-gates)), rtol=1e-6)


def test_only_the_first_dimensions_turn_with_the_position(config, rng):
    params = random_params(config, rng)
    x = np.repeat(rng.normal(size=(1, 1, config.hidden_size)), 9, axis=1).astype(np.float32)
    seen = {}

    def attend(query, key, value):
        seen.update(query=np.asarray(query)[0], key=np.asarray(key)[0])
        return jnp.zeros_like(query)

    rotary = mrope_tables(config, jnp.arange(9)[None])
    GatedAttention(config).apply({"params": params}, x, rotary, attend)
    for heads in seen.values():
        turned, passed = np.split(heads, [config.rotary_dim], axis=-1)
        np.testing.assert_array_equal(passed, np.broadcast_to(passed[:1], passed.shape))
        # Pairs are (i, i + 4) inside the rotated part: their lengths stay.
        first, second = np.split(turned, 2, axis=-1)
        length = np.hypot(first, second)
        np.testing.assert_allclose(length, np.broadcast_to(length[:1], length.shape), rtol=1e-5)
        angle = np.unwrap(np.arctan2(second, first), axis=0)
        speed = config.rope_theta ** (-2 * np.arange(4) / config.rotary_dim)
        turns = np.broadcast_to(np.outer(np.arange(9), speed)[:, None], angle.shape)
        np.testing.assert_allclose(angle - angle[:1], turns, atol=1e-4)
