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
    @pytest.mark.parametrize("name", ["pallas", "triton", "XLA"])
    def test_named_implementation_is_refused_not_replaced(self, name):
        x, base, delta = inputs(np.random.default_rng(4), 2, 3, 2, 8, 2)
        with pytest.raises(ValueError, match=f"{name}.*reference, xla"):
            prepare(x, base, delta, implementation=name)
        with pytest.raises(ValueError, match=f"{name}.*reference, xla"):
            finish(x, x, base, delta[:, :, 1], implementation=name)

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
