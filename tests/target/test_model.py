"""The text stack: taps, norms with their two kinds of gain, the tied head."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import parse_target_config
from dflash_jax.io.names import tensor_table
from dflash_jax.layers import RMSNorm
from dflash_jax.state.sequence import init_cache
from dflash_jax.target.model import TargetModel

HIDDEN = 16


@pytest.fixture(scope="module")
def toy(load_target):
    """Four blocks, the third with full attention, of which block j adds 10**j to channel 0.

    A stream that lives in channel 0 alone is sqrt(H) after a norm, however large it is: the MLP
    sees a constant. Mixers give zero.
    """
    config = dataclasses.replace(
        load_target("dense_text").config,
        vocab_size=8,
        hidden_size=HIDDEN,
        intermediate_size=4,
        num_hidden_layers=4,
        layer_types=("linear_attention",) * 2 + ("full_attention", "linear_attention"),
        tie_word_embeddings=True,
    )
    params = {}
    for spec in tensor_table(config):
        value = np.zeros(spec.shape, np.float32)
        layer = next((int(p[7:]) for p in spec.path if p.startswith("layers_")), None)
        if "embed_tokens" in spec.path:
            value[:, 0] = 1
        elif "gate_proj" in spec.path:
            value[0, 0] = 20 / HIDDEN**0.5  # silu(20) is 20 to float32
        elif "up_proj" in spec.path:
            value[0, 0] = 1 / HIDDEN**0.5
        elif "down_proj" in spec.path:
            value[0, 0] = 10.0**layer / 20
        node = params
        for part in spec.path[:-1]:
            node = node.setdefault(part, {})
        node[spec.path[-1]] = jnp.asarray(value)
    return config, params


def run_toy(toy, tap_ids):
    config, params = toy
    cache = init_cache(config, 1, 0, 1, jnp.float32)
    start, live = jnp.zeros(1, jnp.int32), jnp.full(1, 3, jnp.int32)
    tokens = jnp.zeros((1, 3), jnp.int32)
    run = functools.partial(TargetModel(config).apply, tap_ids=tap_ids, record=True)
    block = jax.jit(run)({"params": params}, tokens, start, live, cache)
    # Above the embedding, which is 1; per tap.
    return np.asarray(block.taps)[0].reshape(3, len(tap_ids), HIDDEN)[..., 0] - 1, block.hidden


def test_a_tap_is_the_output_of_its_block(toy):
    # In the order asked for, the last block among them.
    taps, hidden = run_toy(toy, (2, 0, 3))
    sums = np.float32([111, 1, 1111])
    np.testing.assert_allclose(taps, np.broadcast_to(sums, taps.shape), rtol=1e-4)
    # The last block as a tap is before the final norm, which makes everything sqrt(H).
    np.testing.assert_allclose(hidden[0, :, 0], HIDDEN**0.5, rtol=1e-5)


@pytest.mark.parametrize("tap_ids", [(4,), (-1,)])
def test_a_tap_that_does_not_exist_is_an_error(toy, tap_ids):
    with pytest.raises(KeyError):
        run_toy(toy, tap_ids)


def test_text_norm_is_zero_centred(kernel_oracle):
    x, weight = kernel_oracle["rmsnorm.x"], kernel_oracle["rmsnorm.w"]
    norm = RMSNorm(x.shape[-1], 1e-6, zero_centred=True)
    got = norm.apply({"params": {"weight": weight}}, x)
    np.testing.assert_allclose(got, kernel_oracle["rmsnorm.y"], rtol=0, atol=5e-6)
    wide = np.float64(x)
    exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * (1 + np.float64(weight))
    np.testing.assert_allclose(got, exact, rtol=0, atol=5e-6)
    # It starts as the identity gain: stored zeros.
    fresh = norm.init(jax.random.key(0), x)["params"]["weight"]
    np.testing.assert_array_equal(fresh, np.zeros_like(weight))


def test_gated_norm_is_plain_and_comes_before_the_gate(kernel_oracle):
    x, z, weight = (kernel_oracle[f"gnorm.{name}"] for name in "xzw")
    norm = RMSNorm(x.shape[-1], 1e-6)
    got = norm.apply({"params": {"weight": weight}}, x) * jax.nn.silu(z)
    np.testing.assert_allclose(got, kernel_oracle["gnorm.y"], rtol=0, atol=5e-6)
    fresh = norm.init(jax.random.key(0), x)["params"]["weight"]
    np.testing.assert_array_equal(fresh, np.ones_like(weight))


def test_which_gain_each_norm_has(load_target):
    # A stored zero is a gain of one in text norms and silences a GDN layer in its own norm.
    config, params, oracle = load_target("dense_text")
    layers = config.num_hidden_layers
    linear = config.linear_layers[0]
    ids = jnp.asarray(oracle["short.input_ids"], jnp.int32)
    start, live = jnp.zeros(1, jnp.int32), jnp.full(1, ids.shape[1], jnp.int32)
    cache = init_cache(config, 1, 0, 1, jnp.float32)
    model = TargetModel(config)

    @jax.jit
    def taps(params):
        block = model.apply(
            {"params": params}, ids, start, live, cache, tap_ids=tuple(range(layers)), record=True
        )
        return block.taps.reshape(*ids.shape, layers, -1), block.hidden

    def with_zero(*path):
        tree = jax.tree.map(lambda x: x, params)
        node = tree
        for part in path[:-1]:
            node = node[part]
        node[path[-1]] = {"weight": jnp.zeros_like(node[path[-1]]["weight"])}
        return tree

    # Final norm: the tap over its root mean square.
    last, hidden = taps(with_zero("model", "norm"))
    last = np.float64(last[0, :, -1])
    exact = last / np.sqrt((last**2).mean(-1, keepdims=True) + config.rms_norm_eps)
    np.testing.assert_allclose(hidden[0], exact, rtol=0, atol=1e-5)
    # GDN norm: the mixer of this block adds nothing, so that only its MLP is left.
    block = f"layers_{linear}"
    silent = with_zero("model", block, "linear_attn", "norm")
    removed = with_zero("model", block, "linear_attn", "out_proj")
    got, wanted = taps(silent)[0][..., linear, :], taps(removed)[0][..., linear, :]
    np.testing.assert_array_equal(got, wanted)
    assert np.abs(got - taps(params)[0][..., linear, :]).max() > 0.1


def test_geometry_of_the_published_target(geometries):
    config = parse_target_config(geometries / "qwen3.5-27b.json")
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    row = jax.ShapeDtypeStruct((1,), jnp.int32)

    def init(key, tokens, start, live):
        def touch(model):
            cache = init_cache(config, 1, 0, 1, jnp.bfloat16)
            return model.logits(model(tokens, start, live, cache).hidden)

        return TargetModel(config, jnp.bfloat16).init(key, method=touch)["params"]

    shapes = jax.eval_shape(init, jax.random.key(0), tokens, row, row)
    found = {
        tuple(part.key for part in path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
    }
    assert found == {spec.path: spec.shape for spec in tensor_table(config)}
