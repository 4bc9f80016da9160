"""Where a bfloat16 draft rounds, to the bit, against NumPy on exact numbers.

Each boundary runs compiled, with what feeds it and what consumes it in one program: that is where
a compiler could leave a rounding out. Rounding itself is done here on float64, by arithmetic.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import DraftConfig
from dflash_jax.config.draft import FULL, SLIDING
from dflash_jax.draft.context import CONTEXT_ROLE, materialize, overlaid
from dflash_jax.draft.dynamic_conv import DynamicConv
from dflash_jax.draft.model import CandidateSelector, DraftModel
from dflash_jax.draft.proposal_head import head_scores, take_rows
from dflash_jax.io.names import tensor_table
from dflash_jax.layers import Embedding, Linear
from dflash_jax.state.sequence import init_context
from pallas_kernels.candidate_selector import candidate_selector

CONFIG = DraftConfig(
    dflash2=True,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    layer_types=(SLIDING, FULL),
    sliding_window=8,
    target_layer_ids=(0, 2),
    mask_token_id=7,
    block_size=5,
    vocab_size=32,
    conv_kernel_size=2,
    conv_group_size=8,
    selector_rank=3,
    selector_top_k=4,
)
PAGE, TOKENS = 4, 8
KEEPS = {"float32": 24, "bfloat16": 8}  # bits of a mantissa, the implied one included


def rounded(x, kept):
    """Nearest number with `kept` bits, ties to even; no subnormals of the format among them."""
    mantissa, exponent = np.frexp(np.float64(x))
    return np.ldexp(np.rint(np.ldexp(mantissa, kept)), exponent - kept)


def clear(x, kept, error):
    """Where `x`, known to a relative `error`, is far enough from a tie to say how it rounds."""
    return rounded(x * (1 - error), kept) == rounded(x * (1 + error), kept)


def test_rounding_by_hand():
    # Eight bits: 1 + 2**-7 is the next number after 1.
    values = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -0.1, 65504.0, 3e-39]
    expected = [1, 1 + 2**-6, 1 + 2**-7, -0.10009765625, 65536.0, rounded(3e-39, 8)]
    np.testing.assert_array_equal(rounded(values, 8), expected)
    np.testing.assert_array_equal(rounded(values[:5], 8), np.float64(jnp.bfloat16(values[:5])))


# --- context keys and values, and the representation of their role ---


def random_params(seed):
    """A draft in float32 whose every leaf needs all 24 bits; values of any size."""
    rng, params = np.random.default_rng(seed), {}
    for spec in tensor_table(CONFIG):
        node = params
        for name in spec.path[:-1]:
            node = node.setdefault(name, {})
        gain = len(spec.shape) == 1
        value = rng.normal(float(gain), 0.3 if gain else spec.shape[-1] ** -0.5, spec.shape)
        if spec.path[-2] == "v_proj":
            # From numbers below the least normal float16 to numbers beyond its largest.
            value *= np.exp2(np.linspace(-18, 17, spec.shape[0]))[:, None]
        node[spec.path[-1]] = jnp.asarray(value, jnp.float32)
    return params


def in_dtype(params, dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def role_of(params):
    layers = [f"layers_{index}" for index in range(CONFIG.num_hidden_layers)]
    return {
        name: {"self_attn": {part: params[name]["self_attn"][part] for part in CONTEXT_ROLE}}
        for name in layers
    }


@functools.cache
def compiled(dtype):
    model = DraftModel(CONFIG, jnp.dtype(dtype))

    @jax.jit
    def run(params, role, context, features):
        common = model.apply(
            {"params": params}, features, method=lambda m, f: m.hidden_norm(m.fc(f))
        )
        start, count = jnp.zeros(1, jnp.int32), jnp.full(1, TOKENS)
        merged = overlaid(params, role)
        return common, materialize(
            CONFIG, merged, context, features, start, count, jnp.dtype(dtype)
        )

    return run


def stored(dtype, context_dtype, params, role, features):
    """`(c_t, ring, pages)` of one materialize of all features from position 0."""
    context = init_context(CONFIG, 1, TOKENS, PAGE, jnp.dtype(context_dtype))
    common, (ring, pages) = compiled(dtype)(params, role, context, features)
    pages = [store.reshape(1, TOKENS, *store.shape[3:]) for store in pages[:2]]
    return np.float64(common)[0], [store[:, 0] for store in ring], pages


def exact_key_value(weights, norm, common, layer):
    """Float64 `(key, raw key, value)` `[T, K, D]` of one layer."""
    shape = (TOKENS, CONFIG.num_key_value_heads, CONFIG.head_dim)
    raw = (common @ np.float64(weights["k_proj"]["weight"]).T).reshape(shape)
    value = (common @ np.float64(weights["v_proj"]["weight"]).T).reshape(shape)
    return normed_and_rotated(raw, norm), raw, value


def normed_and_rotated(raw, norm):
    key = np.float64(norm) * raw / np.sqrt((raw**2).mean(-1, keepdims=True) + CONFIG.rms_norm_eps)
    half = CONFIG.head_dim // 2
    angle = np.arange(TOKENS)[:, None] * CONFIG.rope_theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = key[..., :half], key[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@pytest.mark.parametrize("context_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_context_keys_and_values(dtype, context_dtype):
    """K in the role's dtype, rounded once; V float16(bfloat16(v)) in a bfloat16 role's ring.

    The projections are the role's own; c_t is the draft's, in its dtype.
    """
    full = random_params(0)
    params = in_dtype(full, dtype)
    role = None if dtype == context_dtype else in_dtype(role_of(full), context_dtype)
    rng = np.random.default_rng(1)
    width = CONFIG.hidden_size * len(CONFIG.target_layer_ids)
    features = jnp.asarray(rng.normal(size=(1, TOKENS, width)), dtype)
    common, ring, pages = stored(dtype, context_dtype, params, role, features)
    assert (rounded(common, KEEPS[dtype]) == common).all()

    kept = KEEPS[context_dtype]
    # Float32 sums of 32 products, norm and rotation; relative to a key of their size.
    error, checked, seen = 2e-6, 0, {"raw key": 0, "value": 0}
    for index, (key, value) in enumerate((ring, pages)):
        layer = f"layers_{index}"
        weights = (role or params)[layer]["self_attn"]
        norm = params[layer]["self_attn"]["k_norm"]["weight"]
        exact, raw, exact_value = exact_key_value(weights, norm, common, layer)
        assert key.dtype == jnp.dtype(context_dtype)
        got, got_value = np.float64(key[0]), np.float64(value[0])
        if context_dtype == "float32":
            assert value.dtype == jnp.float32
            np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)
            sums = np.abs(common) @ np.abs(np.float64(weights["v_proj"]["weight"])).T
            assert (np.abs(got_value - exact_value) <= 1e-6 * sums.reshape(exact.shape)).all()
            # More bits than bfloat16 has.
            assert (rounded(got, 8) != got).mean() > 0.9
            continue
        # Cancelled sums are known less well: left out.
        certain = clear(exact, kept, error) & (np.abs(exact) > 0.1)
        checked += certain.mean() / 4
        np.testing.assert_array_equal(got[certain], rounded(exact, kept)[certain])
        # A cast between projection and norm would not pass as this.
        early = rounded(normed_and_rotated(rounded(raw, 8), norm), 8)
        seen["raw key"] += (early != got)[certain].mean() / 2

        once = rounded(exact_value, kept)
        certain = clear(exact_value, kept, 1e-5)
        checked += certain.mean() / 4
        with np.errstate(over="ignore"):
            twice = np.float64(once.astype(np.float16))
            straight = np.float64(exact_value.astype(np.float16))
        in_ring = index == 0
        assert value.dtype == (jnp.float16 if in_ring else jnp.bfloat16)
        expected = twice if in_ring else once
        np.testing.assert_array_equal(got_value[certain], expected[certain])
        if in_ring:
            seen["value"] = (straight != got_value)[certain].mean()
            assert np.isinf(expected).any() and (np.abs(expected) < 2**-14).any()
    if context_dtype == "bfloat16":
        assert checked > 0.8
        assert seen["raw key"] > 0.1 and seen["value"] > 0.5


def test_each_role_reads_its_own_weights():
    """Other weights of one role leave every bit of the other alone; sharing is the default."""
    full, other = random_params(0), random_params(1)
    features = jnp.ones((1, TOKENS, 2 * CONFIG.hidden_size), jnp.bfloat16)
    low = in_dtype(full, "bfloat16")

    @jax.jit
    def block(params):
        model = DraftModel(CONFIG, jnp.bfloat16)
        x = jnp.asarray(np.random.default_rng(2).normal(size=(1, 3, 32)), jnp.bfloat16)
        seen = []

        def attend(layer, query, key, value):
            seen.append((key, value))
            return query

        model.apply({"params": params}, x, jnp.arange(3)[None], attend)
        return seen

    def context(params, role):
        return stored("bfloat16", "bfloat16", params, role, features)[1:]

    def same(one, two):
        pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
        return all(np.array_equal(a, b) for a, b in pairs)

    role = role_of(in_dtype(other, "bfloat16"))
    assert same(context(low, None), context(low, role_of(low)))
    assert not same(context(low, None), context(low, role))
    swapped = overlaid(low, role)
    assert same(context(low, role), context(swapped, None))
    assert same(context(swapped, role_of(low)), context(low, None))
    assert not same(block(low), block(swapped))
    # What the query block reads is `params`, into which no role is laid.
    assert overlaid(low, None) is low
    changed = [
        path[-2].key
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(low), jax.tree.leaves(swapped), strict=True
        )
        if a is not b
    ]
    assert sorted(changed) == ["k_proj", "k_proj", "v_proj", "v_proj"]


# --- dynamic convolution ---


def test_prepared_input_and_finish_delta():
    """Both leave `prepare` rounded to bfloat16 once, and `finish` consumes the rounded delta."""
    rng = np.random.default_rng(3)
    rows, columns, hidden, groups = 2, 5, CONFIG.hidden_size, CONFIG.conv_groups
    # Multiples of 1/8 and 1/16 with few bits: every product and sum is exact in float32.
    x = rng.integers(-12, 13, size=(rows, columns, hidden)) / 8
    base = rng.integers(-40, 41, size=(2, 2, hidden)) / 16
    weight = np.zeros((2, 2, groups, hidden))
    weight[0, :, :, :3] = rng.integers(-1, 2, size=(2, groups, 3)) / 8  # few bits
    weight[1] = rng.integers(-40, 41, size=(2, groups, hidden)) / 64  # more than bfloat16 has
    branch = rng.integers(-12, 13, size=x.shape) / 8
    params = {
        "base_kernel": jnp.asarray(base, jnp.bfloat16),
        "kernel_projection": {"weight": jnp.asarray(weight.reshape(-1, hidden), jnp.bfloat16)},
    }

    @jax.jit
    def run(params, x, branch):
        def both(conv, x):
            prepared, delta = conv.prepare(x)
            residual = jnp.zeros(x.shape, jnp.float32)  # keeps the sum: shows the delta used
            return prepared, delta, conv.finish(branch, residual, delta)

        return DynamicConv(CONFIG, jnp.bfloat16).apply({"params": params}, x, method=both)

    prepared, delta, finished = run(
        params, jnp.asarray(x, jnp.bfloat16), jnp.asarray(branch, jnp.bfloat16)
    )
    exact = np.einsum("bwh,stgh->bwstg", x, weight)
    assert (rounded(exact[:, :, 0], 8) == exact[:, :, 0]).all()

    def convolve(x, side, delta):
        coefficient = base[side] + np.repeat(delta, hidden // groups, axis=-1)  # [B, W, 2, H]
        before = np.concatenate([np.zeros((rows, 1, hidden)), x[:, :-1]], axis=1)
        return coefficient[:, :, 0] * x + coefficient[:, :, 1] * before

    assert prepared.dtype == delta.dtype == jnp.bfloat16
    wanted = convolve(x, 0, exact[:, :, 0])
    np.testing.assert_array_equal(np.float64(prepared), rounded(wanted, 8))
    assert (rounded(wanted, 8) != wanted).mean() > 0.2
    once = rounded(exact[:, :, 1], 8)
    np.testing.assert_array_equal(np.float64(delta), once)
    assert (once != exact[:, :, 1]).mean() > 0.3
    np.testing.assert_array_equal(np.float64(finished), convolve(branch, 1, once))
    assert (convolve(branch, 1, exact[:, :, 1]) != np.float64(finished)).mean() > 0.3


# --- selector and scores ---


def test_selector_projection_reaches_the_walk_in_bfloat16():
    """Energies come from the rounded g; scores enter in float32."""
    rng = np.random.default_rng(4)
    hidden = rng.integers(-40, 41, size=(1, 2, 32)) / 8
    weight = rng.integers(-40, 41, size=(3, 32)) / 16
    predecessor, successor = rng.integers(-2, 3, size=(2, 32, 3)) / 4
    config = dataclasses.replace(CONFIG, selector_top_k=3)
    low = functools.partial(jnp.asarray, dtype=jnp.bfloat16)
    params = {
        "hidden_projection": {"weight": low(weight)},
        "predecessor_codebook": low(predecessor),
        "successor_codebook": low(successor),
    }
    candidates = np.array([[[3, 9, 20], [5, 6, 7]]], np.int32)
    # Float32 scores: bfloat16 would round 7 + 2**-9 to 7.
    scores = np.array([[[7 + 2**-9, 6.5, 6], [4, 3.25, 3]]], np.float32)
    anchor, uniforms = np.array([2], np.int32), np.array([[0.999, 0.0]], np.float32)

    @jax.jit
    def run(params, hidden):
        lattice = CandidateSelector(config, jnp.bfloat16).apply({"params": params}, hidden)
        walked = candidate_selector(
            scores, candidates, *lattice, anchor, np.ones(1, np.float32), uniforms
        )
        return lattice[0], walked

    projected, (tokens, choices, law) = run(params, low(hidden))
    exact = hidden @ weight.T
    once = rounded(exact, 8)
    assert projected.dtype == jnp.bfloat16 and law.dtype == jnp.float32
    np.testing.assert_array_equal(np.float64(projected), once)
    assert (once != exact).mean() > 0.5

    def laws(g, scores):
        found, token = [], anchor[0]
        for column in range(2):
            energy = scores[0, column] + successor[candidates[0, column]] @ (
                predecessor[token] * g[0, column]
            )
            mass = np.exp(energy - energy.max())
            found.append(mass / mass.sum())
            token = tokens[0, column]
        return np.array(found)

    # A float32 exponential of energies that are exact.
    np.testing.assert_allclose(law[0], laws(once, np.float64(scores)), rtol=2e-6)
    assert np.abs(laws(exact, np.float64(scores)) - law[0]).max() > 1e-4
    assert np.abs(laws(once, rounded(scores, 8)) - law[0]).max() > 1e-5


@pytest.mark.parametrize("head", ["untied", "tied", "indexed"])
def test_scores_are_float32_sums(head):
    """Scores keep all bits of the products: bfloat16 would tie what differs."""
    rng = np.random.default_rng(5)
    hidden = rng.integers(-40, 41, size=(2, 3, 32)) / 8
    table = rng.integers(-40, 41, size=(20, 32)) / 16
    low_hidden, low_table = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(table, jnp.bfloat16)
    params = {"params": {"weight": low_table}}

    @jax.jit
    def scores(params, hidden):
        if head == "untied":
            return Linear(20, jnp.bfloat16).apply(params, hidden, jnp.float32)
        if head == "tied":
            module = Embedding(20, 32, jnp.bfloat16)
            return module.apply(params, hidden, jnp.float32, method="attend")
        rows = take_rows(params["params"]["weight"], jnp.arange(20))
        return head_scores(rows, hidden)

    got = scores(params, low_hidden)
    exact = hidden @ table.T
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(np.float64(got), exact)
    assert (rounded(exact, 8) != exact).mean() > 0.5
