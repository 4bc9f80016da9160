"""gated_delta_rule against the reference package's outputs and a float64 recurrence.

Two levels, kept apart: numbers within a stated tolerance, and Fold against verify to the bit.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gated_delta_rule
from pallas_kernels.gated_delta_rule.transition import l2_normalise

# The reference's own two forms differ by 5e-7 here; outputs and states are numbers near 1, sums
# of some tens of float32 products.
CLOSE = dict(rtol=5e-6, atol=5e-6)

NAMES = ("query", "key", "value", "g", "beta", "state")


def recurrence(query, key, value, g, beta, state):
    """One row, token by token in float64: outputs `[T, Hv, Dv]`, states `[T + 1, Hv, Dk, Dv]`."""
    query, key, value, g, beta, state = (
        np.asarray(x, np.float64) for x in (query, key, value, g, beta, state)
    )
    key_dim = key.shape[-1]
    ratio = value.shape[1] // key.shape[1]
    outputs, states = np.zeros(value.shape), [state]
    for t in range(len(value)):
        state = state.copy()
        for head in range(value.shape[1]):
            q, k = query[t, head // ratio], key[t, head // ratio]
            q, k = (x / np.sqrt((x * x).sum() + 1e-6) for x in (q, k))
            state[head] *= np.exp(g[t, head])
            error = value[t, head] - k @ state[head]
            state[head] += beta[t, head] * np.outer(k, error)
            outputs[t, head] = q @ state[head] / np.sqrt(key_dim)
        states.append(state)
    return outputs, np.stack(states)


def inputs(rng, rows, tokens, key_heads=2, value_heads=4, key_dim=16, value_dim=8):
    """Random arguments `(query, key, value, g, beta, state)`; heads from slow to fast decay."""

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    # The first head remembers hundreds of tokens, the last one a few.
    g = -np.exp(rng.uniform(-5, 1, size=(rows, tokens, value_heads)))
    g *= np.geomspace(0.01, 1, value_heads)
    return (
        normal(rows, tokens, key_heads, key_dim),
        normal(rows, tokens, key_heads, key_dim),
        normal(rows, tokens, value_heads, value_dim),
        g.astype(np.float32),
        rng.uniform(size=(rows, tokens, value_heads)).astype(np.float32),
        normal(rows, value_heads, key_dim, value_dim),
    )


def filled(args, live, junk):
    """`args` with `junk` in every token from `live[b]` on; the state is left alone."""
    tokens = [x.copy() for x in args[:5]]
    for x in tokens:
        for row, count in enumerate(live):
            x[row, count:] = junk
    return (*tokens, args[5])


def widened(x, tokens):
    """`x [B, T, ...]` with NaN tokens appended."""
    padding = [(0, 0), (0, tokens - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
    return np.pad(x, padding, constant_values=np.nan)


class GatedDeltaRuleCases:
    """Every backend inherits these; `implementation` names it."""

    implementation = None
    # Rows of one call are live for so many tokens each.
    lengths = [0, 1, 2, 63, 64, 65, 127, 128, 129]
    # key heads, value heads, key dim, value dim
    shapes = [(2, 4, 16, 8), (1, 3, 8, 20)]

    def __init_subclass__(cls):
        for function in (gated_delta_rule.prefill, gated_delta_rule.verify, gated_delta_rule.fold):
            bound = jax.jit(functools.partial(function, implementation=cls.implementation))
            setattr(cls, function.__name__, staticmethod(bound))

    # --- level 1: numbers ---

    def test_equals_the_reference_package(self, kernel_oracle):
        pattern = re.compile(r"gdn\.T(\d+)\.q")
        lengths = [int(m[1]) for m in map(pattern.fullmatch, kernel_oracle) if m]
        assert len(lengths) > 2
        for length in lengths:
            prefix = f"gdn.T{length}."
            x = {n[len(prefix) :]: t for n, t in kernel_oracle.items() if n.startswith(prefix)}
            args = [x[name] for name in ("q", "k", "v", "g", "beta")]
            live = np.full(len(x["q"]), length, np.int32)
            # One compiled width for all: the rest is NaN.
            width = max(lengths)
            narrow = [widened(arg, 8) for arg in args] if length <= 8 else None
            args = [widened(arg, width) for arg in args]
            for case, state in (("zero", np.zeros_like(x["s0"])), ("init", x["s0"])):
                output, after = self.prefill(*args, state, live)
                for form in ("chunk", "rec"):
                    where = f"{length} tokens, {case} {form}"
                    np.testing.assert_allclose(
                        output[:, :length], x[f"{case}.{form}_out"], **CLOSE, err_msg=where
                    )
                    np.testing.assert_allclose(
                        after, x[f"{case}.{form}_state"], **CLOSE, err_msg=where
                    )
                if narrow:
                    output = self.verify(*narrow, state, live)
                    np.testing.assert_allclose(output[:, :length], x[f"{case}.rec_out"], **CLOSE)
                    folded = self.fold(*(arg[None] for arg in (state, *narrow[1:])), live)
                    np.testing.assert_allclose(folded[0], x[f"{case}.rec_state"], **CLOSE)

    def test_verify_reads_one_layer_of_a_stack(self, rng):
        *tokens, state = inputs(rng, 2, 4)
        live = np.array([4, 3], np.int32)
        expected = self.verify(*tokens, state, live)
        for layer in range(3):
            stack = np.full((3, *state.shape), np.nan, np.float32)
            stack[layer] = state
            verify = functools.partial(
                gated_delta_rule.verify, layer=layer, implementation=self.implementation
            )
            np.testing.assert_array_equal(jax.jit(verify)(*tokens, stack, live), expected)

    def test_head_ratios(self, rng):
        live = np.array([8, 5, 1, 0], np.int32)
        for shape in self.shapes:
            args = inputs(rng, 4, 8, *shape)
            output, after = self.prefill(*args, live)
            verified = self.verify(*args, live)
            for row, count in enumerate(live):
                expected, states = recurrence(*(x[row] for x in args))
                where = str(shape)
                np.testing.assert_allclose(
                    output[row, :count], expected[:count], **CLOSE, err_msg=where
                )
                np.testing.assert_allclose(
                    verified[row, :count], expected[:count], **CLOSE, err_msg=where
                )
                np.testing.assert_allclose(after[row], states[count], **CLOSE, err_msg=where)

    @pytest.mark.parametrize("junk", [np.nan, 1e15])
    def test_lengths_around_a_chunk_and_junk_after_them(self, rng, junk):
        live = np.array(self.lengths, np.int32)
        args = inputs(rng, len(live), max(self.lengths) + 1)
        output, after = self.prefill(*filled(args, live, junk), live)
        assert np.isfinite(output).all()
        for row, count in enumerate(live):
            expected, states = recurrence(*(x[row] for x in args))
            where = f"{count} live tokens"
            np.testing.assert_allclose(
                output[row, :count], expected[:count], **CLOSE, err_msg=where
            )
            np.testing.assert_allclose(after[row], states[count], **CLOSE, err_msg=where)

    def test_verify_gives_zero_in_dead_columns(self, rng):
        live = np.array([0, 1, 4, 8], np.int32)
        args = inputs(rng, 4, 8)
        output = np.asarray(self.verify(*filled(args, live, np.nan), live))
        for row, count in enumerate(live):
            expected, _ = recurrence(*(x[row] for x in args))
            np.testing.assert_allclose(output[row, :count], expected[:count], **CLOSE)
            assert not output[row, count:].any()

    def test_long_run_with_decay_near_one(self, rng):
        # Stated bound: 512 tokens that hardly forget, one key all zero, relative to the largest
        # entry. float32 roundings of 512 steps add up to some 1e-6 of it.
        bound, middle = 5e-6, 200
        query, key, value, _, beta, state = inputs(rng, 1, 512)
        g = -rng.uniform(0, 2e-4, size=beta.shape).astype(np.float32)
        key[0, middle] = 0
        args = (query, key, value, g, beta, state)
        expected, states = recurrence(*(x[0] for x in args))
        output, after = self.prefill(*args, np.array([512], np.int32))
        assert np.abs(output[0] - expected).max() <= bound * np.abs(expected).max()
        assert np.abs(after[0] - states[-1]).max() <= bound * np.abs(states[-1]).max()
        # The zero key writes nothing: only the decay acts.
        decay = np.exp(np.float64(g[0, middle]))[:, None, None]
        np.testing.assert_allclose(states[middle + 1], decay * states[middle])

    def test_identical_keys_overwrite(self, rng):
        # Without decay and with beta = 1 each token replaces what the key held. The system of a
        # chunk is then a full triangle of ones, whose inverse by plain powers would blow up.
        query, key, value, g, beta, state = inputs(rng, 4, 70)
        key[:] = key[:, :1]
        g[:], beta[:] = 0, 1
        live = np.array([70, 65, 64, 9], np.int32)
        output, after = self.prefill(query, key, value, g, beta, state, live)
        for row, count in enumerate(live):
            expected, states = recurrence(
                query[row], key[row], value[row], g[row], beta[row], state[row]
            )
            np.testing.assert_allclose(after[row], states[count], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(
                output[row, :count], expected[:count], rtol=1e-5, atol=1e-5
            )
            unit = key[row, 0] / np.linalg.norm(key[row, 0], axis=-1, keepdims=True)
            held = np.einsum("hk,hkv->hv", np.repeat(unit, 2, axis=0), after[row])
            np.testing.assert_allclose(held, value[row, count - 1], rtol=1e-5, atol=1e-5)

    def test_extreme_gates_and_tiny_keys(self, rng):
        query, key, value, g, beta, state = inputs(rng, 4, 70)
        g[0], g[1] = -1e-9, -100.0  # hardly any decay; nothing survives a token
        g[2, ::7] = -50.0  # a reset now and then
        key[3] *= 1e-5  # norms far below the square root of the epsilon
        args = (query, key, value, g, beta, state)
        live = np.full(4, 70, np.int32)
        output, after = self.prefill(*args, live)
        for row in range(4):
            expected, states = recurrence(*(x[row] for x in args))
            # Decays inside a chunk are differences of running sums of g, here up to 3000 in row
            # 1 and 500 in row 2: their float32 spacing, 3e-5, is a relative error of the decay.
            tolerance = 5e-5 if row == 2 else 5e-6
            np.testing.assert_allclose(output[row], expected, rtol=tolerance, atol=tolerance)
            np.testing.assert_allclose(after[row], states[-1], rtol=tolerance, atol=tolerance)

    # --- level 2: Fold is the verify trajectory, bit for bit ---

    def probe(self, args, live):
        """States `[B, W, Hv, Dk, Dv]` that verify went through, seen through its outputs.

        With a query along axis i the output of a column is row i of the state times two known
        factors. So every row of the batch is repeated Dk times, with one query direction each.
        """
        query, key, value, g, beta, state = args
        rows, width, key_heads, key_dim = query.shape
        axes = np.tile(np.eye(key_dim, dtype=np.float32) * 1024, (rows, 1))
        query = np.broadcast_to(axes[:, None, None, :], (rows * key_dim, width, key_heads, key_dim))
        repeated = [np.repeat(x, key_dim, axis=0) for x in (key, value, g, beta, state, live)]
        output = np.asarray(self.verify(query, *repeated))
        return np.moveaxis(output.reshape(rows, key_dim, *output.shape[1:]), 1, 3)

    def seen(self, state):
        """What `probe` shows of a state: the same two roundings."""
        state = np.asarray(state)
        key_dim = state.shape[-2]
        axis = np.asarray(l2_normalise(jnp.eye(key_dim) * 1024))
        assert np.count_nonzero(axis) == key_dim
        scale = np.float32(key_dim**-0.5)
        return state * np.diag(axis)[:, None] * scale

    @pytest.mark.parametrize("kind", ["usual", "tiny keys", "no decay", "strong decay"])
    def test_fold_is_the_verify_trajectory(self, rng, kind):
        width = 8
        for shape in self.shapes:
            args = list(inputs(rng, 4, width, *shape))
            if kind == "tiny keys":
                args[1] *= np.float32(1e-5)
            if kind == "no decay":
                args[3] *= np.float32(1e-7)
            if kind == "strong decay":
                args[3] -= 80
            trajectory = self.probe(args, np.full(4, width, np.int32))
            for m in range(width + 1):
                # Rows at different counts, and NaN in the columns past them.
                count = np.array([m, width - m, 0, width], np.int32)
                _, key, value, g, beta, state = filled(args, count, np.nan)
                stacked = (x[None] for x in (state, key, value, g, beta))
                folded = np.asarray(self.fold(*stacked, count))[0]
                for row in range(4):
                    where = f"{shape}, {count[row]} columns"
                    if count[row] == 0:
                        assert folded[row].tobytes() == state[row].tobytes(), where
                    else:
                        np.testing.assert_array_equal(
                            self.seen(folded[row]), trajectory[row, count[row] - 1], where
                        )

    def test_layers_and_rows_fold_independently(self, rng):
        layers, rows, width = 3, 4, 8
        stacked = [inputs(rng, rows, width) for _ in range(layers)]
        count = np.array([8, 0, 2, 5], np.int32)
        _, key, value, g, beta, state = (np.stack(x) for x in zip(*stacked, strict=True))
        folded = np.asarray(self.fold(state, key, value, g, beta, count))
        for layer, args in enumerate(stacked):
            trajectory = self.probe(args, np.full(rows, width, np.int32))
            for row, m in enumerate(count):
                if m == 0:
                    assert folded[layer, row].tobytes() == state[layer, row].tobytes()
                else:
                    shown = self.seen(folded[layer, row])
                    np.testing.assert_array_equal(shown, trajectory[row, m - 1])

    def test_chain_of_rounds(self, rng):
        # The state that enters a verify is itself a fold; the counts change every round.
        rows, width = 4, 8
        state = inputs(rng, rows, width)[5]
        wide = state.astype(np.float64)
        for counts in ([8, 0, 2, 1], [1, 8, 0, 0], [0, 0, 0, 0], [3, 4, 8, 7], [2, 1, 0, 3]):
            args = (*inputs(rng, rows, width)[:5], state)
            trajectory = self.probe(args, np.full(rows, width, np.int32))
            count = np.array(counts, np.int32)
            folded = self.fold(*(x[None] for x in (state, *args[1:5])), count)
            folded = np.asarray(folded)[0]
            for row, m in enumerate(counts):
                _, states = recurrence(*(x[row] for x in args[:5]), wide[row])
                wide[row] = states[m]
                if m == 0:
                    assert folded[row].tobytes() == state[row].tobytes()
                else:
                    np.testing.assert_array_equal(self.seen(folded[row]), trajectory[row, m - 1])
            np.testing.assert_allclose(folded, wide, **CLOSE)
            state = folded

    def test_fold_of_nothing_keeps_every_bit(self):
        # Negative zeros and NaN payloads included.
        state = np.array([-0.0, np.inf, 1e-45, np.nan], np.float32)
        state.view(np.uint32)[3] = 0x7FC12345
        state = np.tile(state, 4).reshape(1, 2, 1, 2, 4)
        column = np.full((1, 2, 3, 1, 2), np.nan, np.float32)
        value = np.full((1, 2, 3, 1, 4), np.nan, np.float32)
        gate = np.full((1, 2, 3, 1), np.nan, np.float32)
        for count in ([0, 0], [0, 3]):
            after = self.fold(state, column, value, gate, gate, np.array(count, np.int32))
            assert np.asarray(after)[0, 0].tobytes() == state[0, 0].tobytes()

    # --- the rest ---

    def test_bfloat16_columns_keep_a_float32_state(self, rng):
        args = inputs(rng, 1, 8)
        columns = [jnp.asarray(x, jnp.bfloat16) for x in args[:3]]
        live = np.array([8], np.int32)
        output, after = self.prefill(*columns, *args[3:], live)
        assert output.dtype == after.dtype == jnp.float32
        # Nothing after the inputs is rounded to bfloat16, whose spacing is 4e-3.
        expected, states = recurrence(
            *(np.float32(x[0]) for x in columns), *(x[0] for x in args[3:])
        )
        np.testing.assert_allclose(output[0], expected, **CLOSE)
        np.testing.assert_allclose(after[0], states[-1], **CLOSE)


class TestXla(GatedDeltaRuleCases):
    implementation = "xla"

    def test_gradients_along_random_directions(self, rng):
        # Central differences of the float64 recurrence: error about 1e-9 at this step.
        tokens, step = 70, 1e-5
        args = list(inputs(rng, 1, tokens, 1, 2, 8, 8))
        args[1][0, 3] = 0  # a zero key must not make a NaN
        args[3][0, 5] = -30.0
        live = np.array([tokens - 2], np.int32)
        weight = rng.normal(size=args[2].shape)[:, : live[0]].astype(np.float32)
        state_weight = rng.normal(size=args[5].shape).astype(np.float32)

        def loss(*args):
            output, after = gated_delta_rule.prefill(*args, live, implementation="xla")
            return jnp.sum(output[:, : live[0]] * weight) + jnp.sum(after * state_weight)

        def exact(*args):
            output, states = recurrence(*(x[0] for x in args))
            return (output[: live[0]] * weight).sum() + (states[live[0]] * state_weight).sum()

        grads = jax.jit(jax.grad(loss, argnums=range(6)))(*args)
        for index, (name, grad) in enumerate(zip(NAMES, grads, strict=True)):
            assert np.isfinite(grad).all(), name
            assert index == 5 or not grad[:, live[0] :].any(), name
            # Not along the zero key: its curvature, 1 / sqrt(1e-6), is too much for the step.
            direction = rng.normal(size=grad.shape) * (args[index] != 0)
            moved = [list(args), list(args)]
            for sign, changed in zip((1, -1), moved, strict=True):
                changed[index] = np.float64(args[index]) + sign * step * direction
            expected = (exact(*moved[0]) - exact(*moved[1])) / (2 * step)
            got = np.sum(np.float64(grad) * direction)
            # Sums over up to 70 tokens, each with the roundings of its own chain.
            assert abs(got - expected) <= 2e-5 * np.linalg.norm(np.float64(grad)), name

    def test_gradients_equal_the_reference(self, rng):
        args = inputs(rng, 1, 70)
        live = np.array([70], np.int32)
        weight = rng.normal(size=args[2].shape).astype(np.float32)
        state_weight = rng.normal(size=args[5].shape).astype(np.float32)

        def gradient(implementation):
            def loss(args):
                output, after = gated_delta_rule.prefill(
                    *args, live, implementation=implementation
                )
                return jnp.sum(output * weight) + jnp.sum(after * state_weight)

            return jax.jit(jax.grad(loss))(args)

        for name, got, want in zip(NAMES, gradient("xla"), gradient("reference"), strict=True):
            scale = np.abs(want).max()
            assert scale > 1e-2, name
            # Sums over up to 70 tokens, each with the roundings of its own chain.
            assert np.abs(got - want).max() <= 2e-5 * scale, name


class TestReference(GatedDeltaRuleCases):
    implementation = "reference"


class TestPallas(GatedDeltaRuleCases):
    implementation = "pallas_interpret"
    # Chunks of 32 here. Four rows of 70 tokens, like two other cases: one compilation for all.
    lengths = [0, 32, 33, 69]

    def test_heads_of_real_models(self, rng):
        # 128 channels are two blocks of the products and sixteen strips; 17 columns of bfloat16
        # records; NaN after the live ones.
        live = np.array([17, 5], np.int32)
        args = inputs(rng, 2, 17, 1, 2, 128, 128)
        columns = [np.asarray(jnp.asarray(x, jnp.bfloat16)) for x in args[:3]]
        args = filled((*columns, *args[3:]), live, np.nan)
        output, after = self.prefill(*args, live)
        verified = np.asarray(self.verify(*args, live))
        for row, count in enumerate(live):
            expected, states = recurrence(*(np.float32(x[row]) for x in args))
            expected = expected[:count]
            np.testing.assert_allclose(output[row, :count], expected, **CLOSE)
            np.testing.assert_allclose(verified[row, :count], expected, **CLOSE)
            np.testing.assert_allclose(after[row], states[count], **CLOSE)
            assert not verified[row, count:].any()

        # To the bit: a verify that goes on from Fold(m) repeats the rest of the outputs.
        query, key, value, g, beta, state = args
        for m in ([3, 0], [16, 4], [1, 5]):
            count = np.array(m, np.int32)
            folded = self.fold(*(x[None] for x in (state, key, value, g, beta)), count)[0]
            rest = [
                np.stack([np.roll(x[row], -shift, axis=0) for row, shift in enumerate(m)])
                for x in args[:5]
            ]
            again = np.asarray(self.verify(*rest, folded, live - count))
            for row, shift in enumerate(m):
                np.testing.assert_array_equal(
                    again[row, : live[row] - shift], verified[row, shift : live[row]]
                )

    def test_gradients_of_prefill_are_those_of_the_xla_form(self, rng):
        args = inputs(rng, 1, 8, 1, 2, 8, 8)
        live = np.array([7], np.int32)

        def gradient(implementation):
            def loss(args):
                output, after = gated_delta_rule.prefill(
                    *args, live, implementation=implementation
                )
                return jnp.sum(jnp.sin(output[:, :7])) + jnp.sum(jnp.sin(after))

            return jax.jit(jax.grad(loss))(args)

        got, expected = gradient(self.implementation), gradient("xla")
        for name, one, other in zip(NAMES, got, expected, strict=True):
            # The cosines come from outputs that differ by a few roundings.
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5, err_msg=name)


def test_default_is_a_known_implementation(rng):
    args = inputs(rng, 1, 8)
    live = np.array([8], np.int32)
    default = gated_delta_rule.verify(*args, live)
    named = gated_delta_rule.verify(*args, live, implementation="xla")
    np.testing.assert_array_equal(default, named)
    with pytest.raises(ValueError, match="'fast'.*expected one of pallas, reference, xla"):
        gated_delta_rule.prefill(*args, live, implementation="fast")
    for function in (gated_delta_rule.prefill, gated_delta_rule.verify):
        with pytest.raises(ValueError, match="'pallas'.*no CUDA device"):
            function(*args, live, implementation="pallas")
    with pytest.raises(ValueError, match="no triton kernel"):
        gated_delta_rule.verify(*args, live, implementation="triton")


def test_shapes_are_checked(rng):
    query, key, value, g, beta, state = inputs(rng, 1, 4)
    live = np.array([4], np.int32)
    with pytest.raises(ValueError, match="4 value heads are not a multiple of 3 key heads"):
        three = np.zeros((1, 4, 3, 8), np.float32)
        gated_delta_rule.prefill(three, three, value, g, beta, state, live)
    with pytest.raises(ValueError, match=r"state has shape \(1, 4, 8, 16\)"):
        gated_delta_rule.verify(query, key, value, g, beta, state.swapaxes(2, 3), live)
    with pytest.raises(ValueError, match=r"layer is 2, expected 0\.\.1"):
        stack = np.stack([state, state])
        gated_delta_rule.verify(query, key, value, g, beta, stack, live, layer=2)
    with pytest.raises(ValueError, match="layer axes differ"):
        gated_delta_rule.fold(state[None], *(np.stack([x, x]) for x in (key, value, g, beta)), live)
