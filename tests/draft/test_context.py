"""The draft's context: what rings and pages hold, however it got there."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dflash_jax.draft.context import attend_context, materialize
from dflash_jax.draft.model import DraftModel
from dflash_jax.state.sequence import DraftContext, init_context

PAGE = 8
# Float32 projections of some hundred products of numbers near 1.
CLOSE = dict(rtol=2e-5, atol=2e-5)


@pytest.fixture(scope="module")
def draft(load_draft):
    """Config and weights with rings and pages, and a window of 8."""
    config, params, _ = load_draft("draft_v1_noncausal")
    config = dataclasses.replace(config, sliding_window=8)
    assert config.local_layers and config.full_layers
    return config, params


@functools.cache
def compiled(config):
    @jax.jit
    def block(params, embeddings, frontier, live, context):
        positions = frontier[:, None] + jnp.arange(embeddings.shape[1])
        attend = attend_context(config, context, frontier, live)
        return DraftModel(config).apply({"params": params}, embeddings, positions, attend)

    return jax.jit(functools.partial(materialize, config, dtype=jnp.float32)), block


def make_features(draft, rng, rows, tokens):
    config, params = draft
    width = params["fc"]["weight"].shape[1]
    assert width == len(config.target_layer_ids) * config.hidden_size
    return rng.normal(size=(rows, tokens, width)).astype(np.float32)


def exact_context(draft, features):
    """Float64 keys and values `[L, B, T, K, D]` of features at positions 0, 1, ..."""
    config, params = draft
    w = jax.tree.map(np.float64, params)

    def norm(x, gain):
        return gain * x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps)

    common = norm(np.float64(features) @ w["fc"]["weight"].T, w["hidden_norm"]["weight"])
    half = config.rotary_dim // 2
    frequency = config.rope_theta ** (-2 * np.arange(half) / config.rotary_dim)
    angle = (np.arange(features.shape[1])[:, None] * frequency)[:, None]
    keys, values = [], []
    for layer in range(config.num_hidden_layers):
        attention = w[f"layers_{layer}"]["self_attn"]
        heads = (*common.shape[:2], config.num_key_value_heads, config.head_dim)
        key = norm(
            (common @ attention["k_proj"]["weight"].T).reshape(heads), attention["k_norm"]["weight"]
        )
        rotated = key.copy()
        first, second = key[..., :half], key[..., half : 2 * half]
        rotated[..., :half] = first * np.cos(angle) - second * np.sin(angle)
        rotated[..., half : 2 * half] = second * np.cos(angle) + first * np.sin(angle)
        keys.append(rotated)
        values.append((common @ attention["v_proj"]["weight"].T).reshape(heads))
    return np.stack(keys), np.stack(values)


def poisoned(config, rows, capacity):
    """An empty context full of NaN."""
    context = init_context(config, rows, capacity, PAGE, jnp.float32)
    ring, pages = context
    return DraftContext(
        jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), ring),
        pages._replace(
            key=jnp.full_like(pages.key, jnp.nan), value=jnp.full_like(pages.value, jnp.nan)
        ),
    )


def check_context(config, context, exact, frontiers):
    """Live positions hold the exact keys and values; everything else is still NaN."""
    slots = config.sliding_window
    local, full = list(config.local_layers), list(config.full_layers)
    for name, index, wanted in (("key", 0, exact[0]), ("value", 1, exact[1])):
        ring, pool = np.asarray(context.ring[index]), np.asarray(context.pages[index])
        table = np.asarray(context.pages.block_table)
        seen = np.zeros(pool.shape[1:3], bool)
        for row, frontier in enumerate(frontiers):
            live = range(max(0, frontier - slots), frontier)
            expected = np.full(ring[:, row].shape, np.nan)
            for p in live:
                expected[:, p % slots] = wanted[local, row, p]
            where = f"{name} of row {row} at {frontier}"
            np.testing.assert_allclose(ring[:, row], expected, **CLOSE, err_msg=f"ring {where}")
            for p in range(frontier):
                page, slot = table[row, p // PAGE], p % PAGE
                seen[page, slot] = True
                np.testing.assert_allclose(
                    pool[:, page, slot], wanted[full, row, p], **CLOSE, err_msg=f"page {where}"
                )
        assert np.isnan(pool[:, ~seen]).all()


def fill(draft, context, features, frontiers, counts, width):
    """One materialize of `counts[b]` columns from each row's frontier, NaN after them."""
    config, params = draft
    columns = np.full((len(counts), width, features.shape[-1]), np.nan, np.float32)
    for row, (start, count) in enumerate(zip(frontiers, counts, strict=True)):
        columns[row, :count] = features[row, start : start + count]
    start, count = np.array(frontiers, np.int32), np.array(counts, np.int32)
    return compiled(config)[0](params, context, columns, start, count)


@pytest.mark.parametrize("chunk", [100, 32, 7, 1])
def test_prompt_in_chunks(draft, chunk):
    # Chunks longer than the ring leave their last window; features of early chunks are not lost.
    config, params = draft
    rng = np.random.default_rng(0)
    features = make_features(draft, rng, 1, 100)
    embeddings = rng.normal(size=(1, 4, config.hidden_size)).astype(np.float32)
    context = poisoned(config, 1, 112)
    for start in range(0, 100, chunk):
        context = fill(draft, context, features, [start], [min(chunk, 100 - start)], chunk)
    exact = exact_context(draft, features)
    check_context(config, context, exact, [100])
    # The block of the first round.
    frontier, live = jnp.array([100]), jnp.array([4])
    hidden = compiled(config)[1](params, embeddings, frontier, live, context)
    ring = [np.zeros_like(x) for x in context.ring]
    pages = [np.zeros_like(x) for x in context.pages[:2]]
    for which in range(2):
        for p in range(100):
            if p >= 100 - config.sliding_window:
                slot = p % config.sliding_window
                ring[which][:, 0, slot] = exact[which][list(config.local_layers), 0, p]
            page = context.pages.block_table[0, p // PAGE]
            pages[which][:, page, p % PAGE] = exact[which][list(config.full_layers), 0, p]
    whole = DraftContext(
        type(context.ring)(*ring), context.pages._replace(key=pages[0], value=pages[1])
    )
    wanted = compiled(config)[1](params, embeddings, frontier, live, whole)
    np.testing.assert_allclose(hidden, wanted, rtol=0, atol=1e-4)


def test_forced_accepts_over_many_rounds(draft):
    # Committed counts cycle through 0..3 in blocks of 4, shifted per row, or are always 1; the
    # rest of a block is noise that must not be stored. The ring wraps several times.
    config, _ = draft
    rounds, width = 24, 4
    features = make_features(draft, np.random.default_rng(1), 3, 3 * rounds)
    exact = exact_context(draft, features)
    context = poisoned(config, 3, 3 * rounds)
    frontiers = [0, 0, 0]
    cycles = [itertools.cycle(c) for c in ((0, 1, 2, 3), (3, 0, 1, 2), (1,))]
    totals = set()
    for _ in range(rounds):
        counts = [next(cycle) for cycle in cycles]
        context = fill(draft, context, features, frontiers, counts, width)
        frontiers = [f + n for f, n in zip(frontiers, counts, strict=True)]
        check_context(config, context, exact, frontiers)
        totals.update(frontiers)
    # Lengths around the window were among them.
    window = config.sliding_window
    assert {window - 1, window, window + 1, window + 3} <= totals and max(totals) > 4 * window


@pytest.mark.parametrize("frontiers", [(0, 3), (7, 8), (9, 21)])
def test_dead_bytes_are_never_read(draft, frontiers):
    config, params = draft
    rng = np.random.default_rng(2)
    features = make_features(draft, rng, 2, 32)
    embeddings = rng.normal(size=(2, 5, config.hidden_size)).astype(np.float32)
    embeddings[1, 3:] = np.nan
    live = jnp.array([5, 3])
    results = []
    for empty in (init_context(config, 2, 32, PAGE, jnp.float32), poisoned(config, 2, 32)):
        context = fill(draft, empty, features, [0, 0], frontiers, 32)
        frontier = jnp.array(frontiers)
        hidden = compiled(config)[1](params, embeddings, frontier, live, context)
        results.append([np.asarray(hidden)[row, : live[row]] for row in range(2)])
    for clean, poison in zip(*results, strict=True):
        assert np.isfinite(clean).all()
        np.testing.assert_array_equal(poison, clean)


def test_rows_are_independent(draft):
    # A row that adds nothing keeps every bit; pages come in any order, unused entries are -1.
    config, _ = draft
    features = make_features(draft, np.random.default_rng(3), 3, 40)
    exact = exact_context(draft, features)
    context = poisoned(config, 3, 40)
    table = np.array([[7, 2, -1, -1, -1], [-1] * 5, [0, 11, 5, 3, -1]], np.int32)
    context = context._replace(pages=context.pages._replace(block_table=jnp.asarray(table)))
    context = fill(draft, context, features, [0, 0, 0], [9, 0, 20], 32)
    check_context(config, context, exact, [9, 0, 20])
    before = context
    context = fill(draft, context, features, [9, 0, 20], [0, 0, 12], 32)
    check_context(config, context, exact, [9, 0, 32])
    for old, new in zip(before.ring, context.ring, strict=True):
        assert np.asarray(old)[:, :2].tobytes() == np.asarray(new)[:, :2].tobytes()


def test_bfloat16_rounds_each_stored_number_once(draft):
    # Keys: float32 from projection to rotation, then bfloat16. Values: bfloat16, then float16.
    config, params = draft
    low = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params)
    features = make_features(draft, np.random.default_rng(4), 1, 8).astype(ml_dtypes.bfloat16)
    context = init_context(config, 1, 8, PAGE, jnp.bfloat16)
    run = jax.jit(functools.partial(materialize, config, dtype=jnp.bfloat16))
    context = run(low, context, features, jnp.zeros(1, jnp.int32), jnp.array([8]))
    common = DraftModel(config, jnp.bfloat16).apply(
        {"params": low}, features, method=lambda m, f: m.hidden_norm(m.fc(f))
    )
    # From here on in float64.
    identity = np.eye(config.hidden_size)
    weights = jax.tree.map(np.float32, low)
    wide = {**weights, "fc": {"weight": identity}, "hidden_norm": {"weight": np.float64(1)}}
    common = np.float64(common)
    scale = np.sqrt((common**2).mean(-1, keepdims=True) + config.rms_norm_eps)
    keys, values = exact_context((config, wide), common)
    # `exact_context` normalises once more: undone for the values, without effect on the keys but
    # for the epsilon.
    values = values * scale[..., None]
    ring, pages = context
    pages = [store[:, 0][:, None] for store in pages[:2]]
    for layers, (key, value), value_dtype in (
        (config.local_layers, ring, jnp.float16),
        (config.full_layers, pages, jnp.bfloat16),
    ):
        assert (key.dtype, value.dtype) == (jnp.bfloat16, value_dtype)
        exact = keys[list(layers)]
        half_ulp = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 8)
        error = np.abs(np.float64(key) - exact)
        # 2 per cent of slack for float32 sums and the epsilon.
        assert (error <= 1.02 * half_ulp + 2e-5).all()
        exact = values[list(layers)]
        half_ulp = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 8)
        assert (np.abs(np.float64(value) - exact) <= 1.02 * half_ulp + 2e-5).all()
        # Every stored value is a bfloat16 number, in a float16 ring too.
        represented = np.float32(value).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(np.float32(represented), np.float32(value))
