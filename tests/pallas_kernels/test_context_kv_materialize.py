"""context_kv_materialize against a loop that writes position after position."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.context_kv_materialize import context_kv_materialize

# A float32 angle of at most about 100 is off by 100 * 2**-24 = 6e-6; keys are at most about 4.
FLOAT32 = dict(rtol=2e-5, atol=2e-5)
EPS, THETA = 1e-6, 1e4


def normed(key, key_norm, position, rotary_dim):
    key, key_norm = np.float64(key), np.float64(key_norm)
    key = key_norm * key / np.sqrt(np.mean(key * key, axis=-1, keepdims=True) + EPS)
    half = rotary_dim // 2
    output = key.copy()
    for i in range(half):
        angle = position * THETA ** (-2 * i / rotary_dim)
        first, second = key[..., i], key[..., i + half]
        output[..., i] = first * np.cos(angle) - second * np.sin(angle)
        output[..., i + half] = second * np.cos(angle) + first * np.sin(angle)
    return output


def oracle(key, value, key_norm, ring_key, ring_value, frontier, live, rotary_dim):
    """Writes every live column in order, later positions over earlier ones, in float64."""
    ring_key, ring_value = np.float64(ring_key), np.float64(ring_value)
    written = np.zeros(ring_key.shape[1:3], bool)
    layers, rows = key.shape[:2]
    for b in range(rows):
        for i in range(int(live[b])):
            position = int(frontier[b]) + i
            slot = position % ring_key.shape[2]
            written[b, slot] = True
            for layer in range(layers):
                ring_key[layer, b, slot] = normed(
                    key[layer, b, i], key_norm[layer], position, rotary_dim
                )
                ring_value[layer, b, slot] = value[layer, b, i]
    return ring_key, ring_value, written


def inputs(rng, frontier, live, columns, slots, kv_heads, dim, layers=2):
    """Random tensors, NaN in dead columns; the ring starts full of recognisable numbers."""
    rows = len(frontier)
    key, value = rng.normal(size=(2, layers, rows, columns, kv_heads, dim)).astype(np.float32)
    for b in range(rows):
        key[:, b, live[b] :] = value[:, b, live[b] :] = np.nan
    key_norm = rng.uniform(0.5, 1.5, size=(layers, dim)).astype(np.float32)
    shape = (layers, rows, slots, kv_heads, dim)
    ring_key, ring_value = rng.normal(size=(2, *shape)).astype(np.float32)
    return (key, value, key_norm, ring_key, ring_value, np.int32(frontier), np.int32(live))


class ContextKvMaterializeCases:
    """Every backend inherits these; `function` is the op with its implementation bound."""

    function = None

    def write(self, *args, rotary_dim, **jit_options):
        run = jax.jit(self.function, static_argnames=("eps", "theta", "rotary_dim"), **jit_options)
        return run(*args, eps=EPS, theta=THETA, rotary_dim=rotary_dim)

    @pytest.mark.parametrize(
        "slots, columns, kv_heads, dim, rotary_dim",
        [
            (6, 1, 2, 8, 8),
            (6, 4, 1, 20, 20),
            (5, 5, 2, 24, 12),
            (4, 11, 2, 8, 8),  # a chunk that goes round more than twice
            (16, 16, 1, 96, 96),
        ],
    )
    def test_equals_writing_in_order(self, slots, columns, kv_heads, dim, rotary_dim):
        rng = np.random.default_rng(0)
        frontier = [0, slots - 1, slots, slots + 1, 3 * slots + 2]
        for shift in range(3):
            live = np.roll([columns, 0, 1, columns - 1, (columns + 1) // 2], shift).tolist()
            args = inputs(rng, frontier, live, columns, slots, kv_heads, dim)
            got_key, got_value = self.write(*args, rotary_dim=rotary_dim)
            key, value, written = oracle(*args, rotary_dim)
            np.testing.assert_allclose(got_key, key, **FLOAT32)
            np.testing.assert_array_equal(got_value, np.float32(value))
            np.testing.assert_array_equal(got_key[:, ~written], args[3][:, ~written])

    def test_slots_that_are_not_written_keep_their_bits(self):
        # NaN with a payload: copying is fine, arithmetic on it would not be.
        args = list(inputs(np.random.default_rng(1), [3, 9], [2, 0], 4, 6, 2, 8))
        payload = np.uint32(0x7FC12345)
        args[3] = args[4] = np.full(args[3].shape, payload, np.uint32).view(np.float32)
        *_, written = oracle(*args, 8)
        for got in self.write(*args, rotary_dim=8):
            bits = np.asarray(got).view(np.uint32)
            assert (bits[:, ~written] == payload).all()
            assert np.isfinite(np.asarray(got)[:, written]).all()

    def test_float16_values_go_through_bfloat16(self):
        # Ties of the first rounding go to even: 1 + 2**-8 down, 1 + 3 * 2**-8 up. 70000
        # overflows float16; 1e-6 and 6e-8 are float16 subnormals.
        special = [1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8 + 2**-20), 70000.0, 1e-6, 6e-8, -0.0, 0.1]
        args = list(inputs(np.random.default_rng(2), [5, 7], [4, 4], 4, 4, 2, 8))
        args[1][0, 0, 0, 0] = special
        args[4] = jnp.asarray(args[4], jnp.float16)
        _, got = self.write(*args, rotary_dim=8)
        assert got.dtype == jnp.float16
        for b, start in enumerate([5, 7]):
            for i in range(4):
                rounded = args[1][:, b, i].astype(ml_dtypes.bfloat16).astype(np.float32)
                with np.errstate(over="ignore"):
                    expected = rounded.astype(np.float16)
                actual = np.asarray(got[:, b, (start + i) % 4])
                np.testing.assert_array_equal(actual.view(np.uint16), expected.view(np.uint16))

    def test_bfloat16_ring_takes_a_plain_cast_of_values(self):
        args = list(inputs(np.random.default_rng(3), [0], [4], 4, 4, 2, 8))
        args[4] = jnp.asarray(args[4], jnp.bfloat16)
        _, got = self.write(*args, rotary_dim=8)
        expected = args[1][:, :1].astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(np.asarray(got).view(np.uint16), expected.view(np.uint16))

    def test_keys_are_rounded_once(self):
        # Half a bfloat16 ulp of the float64 truth (and the float32 error of the angle): a cast
        # between projection, norm and rotation would be seen.
        args = list(inputs(np.random.default_rng(4), [0, 3], [6, 6], 6, 6, 2, 32))
        args[3] = jnp.asarray(args[3], jnp.bfloat16)
        got, _ = self.write(*args, rotary_dim=32)
        assert got.dtype == jnp.bfloat16
        expected, *_ = oracle(*args, 32)
        half_ulp = 2.0 ** (np.floor(np.log2(np.abs(expected))) - 8)
        assert (np.abs(np.float64(got) - expected) <= half_ulp + 3e-6).all()

    def test_bfloat16_projections(self):
        args = list(inputs(np.random.default_rng(5), [2], [3], 4, 6, 2, 8))
        args[0], args[1] = (jnp.asarray(x, jnp.bfloat16) for x in args[:2])
        got_key, got_value = self.write(*args, rotary_dim=8)
        key, value, _ = oracle(*args, 8)
        np.testing.assert_allclose(got_key, key, **FLOAT32)
        np.testing.assert_array_equal(got_value, np.float32(value))

    def test_many_rounds_leave_the_last_window(self):
        # Ring of 8, blocks of 4, 40 rounds that commit 1..4 columns: after each round the ring
        # holds the last 8 committed positions; columns past the committed ones are NaN. Buffers
        # are donated, as in the decoding loop.
        rng = np.random.default_rng(6)
        history, frontier = [], 0
        key_norm = np.ones((1, 4), np.float32)
        rings = (jnp.full((1, 1, 8, 1, 4), jnp.nan), jnp.full((1, 1, 8, 1, 4), jnp.nan))
        for step in range(40):
            live = step % 4 + 1
            key, value, *_ = inputs(rng, [frontier], [live], 4, 8, 1, 4, layers=1)
            rings = self.write(
                key,
                value,
                key_norm,
                *rings,
                np.int32([frontier]),
                np.int32([live]),
                rotary_dim=4,
                donate_argnums=(3, 4),
            )
            history += [(key[0, 0, i], value[0, 0, i]) for i in range(live)]
            frontier += live
            for position in range(max(0, frontier - 8), frontier):
                raw_key, raw_value = history[position]
                expected = normed(raw_key, key_norm[0], position, 4)
                np.testing.assert_allclose(rings[0][0, 0, position % 8], expected, **FLOAT32)
                np.testing.assert_array_equal(rings[1][0, 0, position % 8], raw_value)
            assert np.isfinite(rings[0]).all() == (frontier >= 8)


reference = functools.partial(context_kv_materialize, implementation="reference")


class TestReference(ContextKvMaterializeCases):
    function = reference


class TestPallas(ContextKvMaterializeCases):
    function = functools.partial(context_kv_materialize, implementation="pallas_interpret")

    @pytest.mark.parametrize("dim, kv_heads", [(64, 4), (128, 8), (256, 2)])
    def test_heads_of_real_models(self, dim, kv_heads):
        # 17 columns of a ring of 7: tiles of 16 vectors that are dead, live and both; bfloat16
        # keys and float16 values, as a 27B draft keeps them.
        frontier, live = [0, 6, 7, 8, 23], [17, 0, 1, 7, 9]
        args = list(inputs(np.random.default_rng(9), frontier, live, 17, 7, kv_heads, dim, 1))
        args[3], args[4] = jnp.asarray(args[3], jnp.bfloat16), jnp.asarray(args[4], jnp.float16)
        got_key, got_value = self.write(*args, rotary_dim=dim)
        key, value = reference(*args, eps=EPS, theta=THETA, rotary_dim=dim)
        # One bfloat16 apart where float32 sums of another order lie next to a tie.
        np.testing.assert_allclose(np.float32(got_key), np.float32(key), rtol=2**-7, atol=1e-5)
        np.testing.assert_array_equal(
            np.asarray(got_value).view(np.uint16), np.asarray(value).view(np.uint16)
        )


class TestXla(ContextKvMaterializeCases):
    function = functools.partial(context_kv_materialize, implementation="xla")

    def test_gradients(self):
        args = inputs(np.random.default_rng(7), [2, 5], [3, 4], 4, 6, 2, 8)

        def loss(function, tensors):
            options = dict(eps=EPS, theta=THETA, rotary_dim=8)
            rings = function(*tensors, *args[5:], **options)
            return sum(jnp.sum(jnp.sin(ring)) for ring in rings)

        clean = [jnp.nan_to_num(x) for x in args[:5]]
        expected = jax.jit(jax.grad(functools.partial(loss, reference)))(clean)
        got = jax.jit(jax.grad(functools.partial(loss, self.function)))(clean)
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, other, **FLOAT32)


class TestApi:
    options = dict(eps=EPS, theta=THETA)

    def args(self):
        return list(inputs(np.random.default_rng(8), [3, 9], [2, 0], 4, 6, 2, 8))

    @pytest.mark.parametrize(
        "name, why", [("pallas", "no CUDA device"), ("triton", "no triton"), ("XLA", "expected")]
    )
    def test_named_implementation_is_refused_not_replaced(self, name, why):
        with pytest.raises(ValueError, match=f"{name}.*{why}"):
            context_kv_materialize(*self.args(), **self.options, rotary_dim=8, implementation=name)

    @pytest.mark.parametrize(
        "index, name, shape",
        [
            (0, "key", (2, 4, 2, 8)),
            (1, "value", (2, 2, 3, 2, 8)),
            (2, "key_norm", (8,)),
            (3, "ring_key", (1, 2, 6, 2, 8)),
            (4, "ring_value", (2, 2, 5, 2, 8)),
            (5, "frontier", (3,)),
            (6, "live", (2, 1)),
        ],
    )
    def test_shape_errors_name_the_argument(self, index, name, shape):
        args = self.args()
        args[index] = jnp.zeros(shape)
        with pytest.raises(ValueError, match=rf"{name}: got .*expected"):
            context_kv_materialize(*args, **self.options, rotary_dim=8)

    @pytest.mark.parametrize("rotary_dim", [0, 3, 10])
    def test_rotary_dim(self, rotary_dim):
        with pytest.raises(ValueError, match=f"rotary_dim: got {rotary_dim}"):
            context_kv_materialize(*self.args(), **self.options, rotary_dim=rotary_dim)
