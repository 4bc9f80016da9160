"""dynamic_grouped_conv against float64 loops."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.dynamic_grouped_conv import finish, prepare

# Sums of at most four float32 products of numbers near 1.
FLOAT32 = dict(rtol=1e-6, atol=2e-6)
# One rounding to bfloat16 (8 bits: half an ulp is at most 2**-8) of a float32 sum.
BFLOAT16 = dict(rtol=2**-8 * 1.001, atol=1e-6)


def oracle(x, base, delta, side):
    x, base, delta = (np.asarray(a, np.float64) for a in (x, base, delta))
    rows, columns, hidden = x.shape
    taps, groups = delta.shape[-2:]
    output = np.zeros(x.shape)
    for b in range(rows):
        for i in range(columns):
            for c in range(hidden):
                group = c // (hidden // groups)
                for tap in range(taps):
                    if i - tap >= 0:
                        coefficient = base[side, tap, c] + delta[b, i, tap, group]
                        output[b, i, c] += coefficient * x[b, i - tap, c]
    return output


def inputs(rng, rows, columns, groups, width, taps, dtype=np.float32):
    hidden = groups * width
    x = rng.normal(size=(rows, columns, hidden))
    base = rng.normal(size=(2, taps, hidden))
    delta = rng.normal(size=(rows, columns, 2, taps, groups))
    return tuple(jnp.asarray(a, dtype) for a in (x, base, delta))


class DynamicGroupedConvCases:
    """Every backend inherits these; the functions come with their implementation bound."""

    prepare = None
    finish = None

    @pytest.mark.parametrize("taps", [1, 2, 3])
    @pytest.mark.parametrize(
        "rows, columns, groups, width", [(3, 5, 3, 16), (2, 2, 5, 8), (8, 1, 4, 8)]
    )
    def test_equals_loops(self, rows, columns, groups, width, taps):
        rng = np.random.default_rng(0)
        x, base, delta = inputs(rng, rows, columns, groups, width, taps)
        prepared, finish_delta = jax.jit(self.prepare)(x, base, delta)
        np.testing.assert_allclose(prepared, oracle(x, base, delta[:, :, 0], 0), **FLOAT32)
        np.testing.assert_array_equal(finish_delta, delta[:, :, 1])
        residual = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
        branch = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
        got = jax.jit(self.finish)(branch, residual, base, finish_delta)
        expected = np.float64(residual) + oracle(branch, base, finish_delta, 1)
        np.testing.assert_allclose(got, expected, **FLOAT32)

    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
    def test_norm_inside_is_the_norm_before(self, dtype):
        # 80 channels: no power of two.
        rng = np.random.default_rng(7)
        x, base, delta = inputs(rng, 2, 5, 5, 16, 2, dtype)
        x = 3 * x  # represented in the dtype
        weight = jnp.asarray(rng.uniform(0.5, 1.5, size=80), dtype)
        prepared, finish_delta = jax.jit(functools.partial(self.prepare, eps=1e-3))(
            x, base, delta, weight
        )
        wide = np.float64(x)
        normed = np.float64(weight) * wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3)
        np.testing.assert_array_equal(finish_delta, delta[:, :, 1])
        if dtype == np.float32:
            np.testing.assert_allclose(prepared, oracle(normed, base, delta[:, :, 0], 0), **FLOAT32)
        else:
            # The norm is rounded as the projection's input was. A float32 sum next to a tie may
            # round the other way than float64: one part in 2**8 of a term, rarely.
            normed = normed.astype(ml_dtypes.bfloat16)
            expected = oracle(normed, base, delta[:, :, 0], 0)
            wrong = np.abs(np.float64(prepared) - expected) > 2**-8 * 1.001 * np.abs(expected)
            assert wrong.mean() < 0.01

    def test_first_column_has_no_history_and_taps_look_back(self):
        # Two channels in two groups. Tap 0 scales by 1 (+ delta), tap 1 by 10, tap 2 by 100.
        x = jnp.array([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])
        base = jnp.array([[[1.0, 1.0], [10.0, 10.0], [100.0, 100.0]]] * 2)
        delta = jnp.zeros((1, 3, 2, 3, 2)).at[0, 1, 0, 1, 1].set(-10.0)
        prepared, _ = jax.jit(self.prepare)(x, base, delta)
        expected = [[1, 2], [3 + 10, 4 + 0], [5 + 30 + 100, 6 + 40 + 200]]
        np.testing.assert_array_equal(prepared[0], expected)

    @pytest.mark.parametrize("taps", [2, 3])
    def test_bfloat16_rounds_once_and_finish_uses_the_rounded_delta(self, taps):
        rng = np.random.default_rng(1)
        x, base, _ = inputs(rng, 2, 4, 3, 16, taps, dtype=jnp.bfloat16)
        delta = jnp.asarray(rng.normal(size=(2, 4, 2, taps, 3)), jnp.float32)
        prepared, finish_delta = jax.jit(self.prepare)(x, base, delta)
        assert prepared.dtype == finish_delta.dtype == jnp.bfloat16
        rounded = np.asarray(delta[:, :, 1]).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(
            np.asarray(finish_delta).view(np.uint16), rounded.view(np.uint16)
        )
        expected = oracle(x, base, delta[:, :, 0], 0)
        np.testing.assert_allclose(np.float64(prepared), expected, **BFLOAT16)

        residual, branch = x[::-1], prepared
        got = jax.jit(self.finish)(branch, residual, base, finish_delta)
        assert got.dtype == jnp.bfloat16
        expected = np.float64(residual) + oracle(branch, base, rounded, 1)
        np.testing.assert_allclose(np.float64(got), expected, **BFLOAT16)

    def test_finish_in_the_same_jit_still_sees_the_rounded_delta(self):
        # XLA may drop a bfloat16 round trip inside one program. With a branch of ones and no
        # base, a float32 residual shows the delta itself.
        delta = jnp.full((1, 1, 2, 1, 1), 1.0 + 2**-10, jnp.float32)
        x, base = jnp.ones((1, 1, 8), jnp.bfloat16), jnp.zeros((2, 1, 8))

        @jax.jit
        def both(x, base, delta):
            _, finish_delta = self.prepare(x, base, delta)
            return self.finish(x, jnp.zeros(x.shape, jnp.float32), base, finish_delta)

        np.testing.assert_array_equal(both(x, base, delta), np.ones((1, 1, 8)))

    def test_later_columns_and_other_rows_do_not_leak(self):
        x, base, delta = inputs(np.random.default_rng(2), 3, 5, 2, 8, 3)
        run = jax.jit(self.prepare)
        plain, _ = run(x, base, delta)
        poisoned, _ = run(
            x.at[:, 3:].set(jnp.nan).at[1].set(jnp.nan), base, delta.at[:, 3:].set(jnp.nan)
        )
        rows = np.array([0, 2])
        np.testing.assert_array_equal(poisoned[rows, :3], plain[rows, :3])


reference = (
    functools.partial(prepare, implementation="reference"),
    functools.partial(finish, implementation="reference"),
)


class TestReference(DynamicGroupedConvCases):
    prepare, finish = reference


class TestPallas(DynamicGroupedConvCases):
    prepare = functools.partial(prepare, implementation="pallas_interpret")
    finish = functools.partial(finish, implementation="pallas_interpret")

    @pytest.mark.parametrize("columns", [1, 16, 17])
    def test_more_than_one_span_of_channels(self, columns):
        # 1040 channels: 65 groups, one of them in a second program.
        rng = np.random.default_rng(8)
        x, base, delta = inputs(rng, 1, columns, 65, 16, 2, jnp.bfloat16)
        prepared, finish_delta = jax.jit(self.prepare)(x, base, delta)
        expected, expected_delta = reference[0](x, base, delta)
        # Both round float32 sums that may differ in their last bit: at a tie, one bfloat16 apart.
        np.testing.assert_allclose(
            np.float32(prepared), np.float32(expected), rtol=2**-7, atol=1e-6
        )
        np.testing.assert_array_equal(finish_delta, expected_delta)
        got = jax.jit(self.finish)(prepared, x, base, finish_delta)
        expected = reference[1](prepared, x, base, finish_delta)
        np.testing.assert_allclose(np.float32(got), np.float32(expected), rtol=2**-7, atol=1e-6)

    def test_gradients_are_those_of_the_xla_form(self):
        args = inputs(np.random.default_rng(9), 1, 3, 2, 8, 2)

        def loss(implementation, x, base, delta):
            prepared, finish_delta = prepare(x, base, delta, implementation=implementation)
            out = finish(prepared, x, base, finish_delta, implementation=implementation)
            return jnp.sum(jnp.sin(out))

        got, expected = (
            jax.jit(jax.grad(functools.partial(loss, name), argnums=(0, 1, 2)))(*args)
            for name in ("pallas_interpret", "xla")
        )
        for one, other in zip(got, expected, strict=True):
            # The cosines come from outputs that may differ in their last bit.
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


class TestXla(DynamicGroupedConvCases):
    prepare = functools.partial(prepare, implementation="xla")
    finish = functools.partial(finish, implementation="xla")

    def test_gradients(self):
        args = inputs(np.random.default_rng(3), 2, 4, 2, 8, 2)

        def loss(prepare, finish, args):
            x, base, delta = args
            prepared, finish_delta = prepare(x, base, delta)
            return jnp.sum(jnp.sin(finish(jnp.tanh(prepared), x, base, finish_delta)))

        expected = jax.jit(jax.grad(functools.partial(loss, *reference)))(args)
        got = jax.jit(jax.grad(functools.partial(loss, self.prepare, self.finish)))(args)
        for one, other in zip(got, expected, strict=True):
            # Sums over up to 8 columns in another order.
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


class TestApi:
    @pytest.mark.parametrize(
        "name, why", [("pallas", "no CUDA device"), ("triton", "no triton"), ("XLA", "expected")]
    )
    def test_named_implementation_is_refused_not_replaced(self, name, why):
        x, base, delta = inputs(np.random.default_rng(4), 2, 3, 2, 8, 2)
        with pytest.raises(ValueError, match=f"{name}.*{why}"):
            prepare(x, base, delta, implementation=name)
        with pytest.raises(ValueError, match=f"{name}.*{why}"):
            finish(x, x, base, delta[:, :, 1], implementation=name)

    def test_norm_weight_and_eps_come_together(self):
        x, base, delta = inputs(np.random.default_rng(4), 2, 3, 2, 8, 2)
        with pytest.raises(ValueError, match="eps: got None"):
            prepare(x, base, delta, jnp.ones(16))
        with pytest.raises(ValueError, match="eps: got 1e-06"):
            prepare(x, base, delta, eps=1e-6)

    @pytest.mark.parametrize(
        "index, name, shape",
        [
            (0, "x", (2, 3)),
            (1, "base", (2, 2, 15)),
            (2, "delta", (2, 3, 2, 3, 2)),
            (2, "delta", (2, 3, 2, 2, 3)),  # 16 channels do not split into 3 groups
        ],
    )
    def test_shape_errors_name_the_argument(self, index, name, shape):
        args = list(inputs(np.random.default_rng(5), 2, 3, 2, 8, 2))
        args[index] = jnp.zeros(shape)
        with pytest.raises(ValueError, match=rf"{name}: got .*expected"):
            prepare(*args)

    def test_finish_shape_errors_name_the_argument(self):
        x, base, delta = inputs(np.random.default_rng(6), 2, 3, 2, 8, 2)
        with pytest.raises(ValueError, match="residual: got"):
            finish(x, x[:1], base, delta[:, :, 1])
        with pytest.raises(ValueError, match="finish_delta: got"):
            finish(x, x, base, delta)
