"""sliding_window_attention against float64 loops over absolute positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.sliding_window_attention import sliding_window_attention
from tests.pallas_kernels.tools import attention_gradients

# float32 sums of at most some hundred unit terms with weights that sum to 1: a few dozen ulps of
# numbers near 1.
FLOAT32 = dict(rtol=1e-5, atol=1e-5)
# The output is rounded to 8 significant bits; numbers are at most about 3. The kernel also rounds
# its weights to the values' dtype: half an ulp of each term at most.
BFLOAT16 = dict(rtol=2**-8, atol=2**-8)

LAYER = 1


def oracle(q, block_key, block_value, ring_key, ring_value, frontier, live, causal, scale=None):
    q, block_key, block_value, ring_key, ring_value = (
        np.asarray(x, np.float64) for x in (q, block_key, block_value, ring_key, ring_value)
    )
    rows, columns, heads, dim = q.shape
    slots, kv_heads = ring_key.shape[2:4]
    scale = dim**-0.5 if scale is None else scale
    output = np.zeros(q.shape)
    for b in range(rows):
        start = int(frontier[b])
        held = {p: ("ring", p % slots) for p in range(max(0, start - slots), start)}
        held |= {start + i: ("block", i) for i in range(int(live[b]))}
        for i in range(int(live[b])):
            for h in range(heads):
                k = h // (heads // kv_heads)
                scores, values = [], []
                for p, (where, index) in held.items():
                    distance = start + i - p
                    if abs(distance) >= slots or (causal and distance < 0):
                        continue
                    if where == "ring":
                        key = ring_key[LAYER, b, index, k]
                        value = ring_value[LAYER, b, index, k]
                    else:
                        key, value = block_key[b, index, k], block_value[b, index, k]
                    scores.append(scale * float(q[b, i, h] @ key))
                    values.append(value)
                weights = np.exp(np.array(scores) - max(scores))
                output[b, i, h] = (weights / weights.sum()) @ np.array(values)
    return output


def inputs(rng, frontier, live, heads, kv_heads, dim, slots, columns, dtype=np.float32):
    """Random tensors with NaN in everything dead, the other layer included."""
    rows = len(frontier)
    q = rng.normal(size=(rows, columns, heads, dim))
    block_key, block_value = rng.normal(size=(2, rows, columns, kv_heads, dim))
    ring_key, ring_value = rng.normal(size=(2, 2, rows, slots, kv_heads, dim))
    ring_key[1 - LAYER] = ring_value[1 - LAYER] = np.nan
    for b in range(rows):
        for tensor in (q, block_key, block_value):
            tensor[b, live[b] :] = np.nan
        ring_key[LAYER, b, frontier[b] :] = ring_value[LAYER, b, frontier[b] :] = np.nan
    tensors = (jnp.asarray(x, dtype) for x in (q, block_key, block_value, ring_key, ring_value))
    return (*tensors, jnp.asarray(frontier, jnp.int32), jnp.asarray(live, jnp.int32))


def frontiers(slots):
    return [0, 1, slots - 1, slots, slots + 1, 3 * slots + 2]


class SlidingWindowAttentionCases:
    """Every backend inherits these; `function` is the op with its implementation bound."""

    function = None

    def attend(self, *args, **options):
        run = jax.jit(self.function, static_argnames=("layer", "causal", "scale"))
        output = run(*args, layer=LAYER, **options)
        assert output.dtype == args[0].dtype
        return np.asarray(output, np.float32)

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(
        "heads, kv_heads, dim, slots, columns",
        [
            (4, 2, 8, 6, 4),
            (6, 2, 20, 8, 5),
            (3, 3, 24, 4, 9),  # block longer than the window
            (4, 1, 96, 5, 1),
            (2, 2, 64, 16, 16),
        ],
    )
    def test_equals_loops_over_positions(self, heads, kv_heads, dim, slots, columns, causal):
        rng = np.random.default_rng(0)
        for shift in range(2):
            pattern = [columns, 0, 1, columns - 1, columns, (columns + 1) // 2]
            live = np.roll(pattern, shift).tolist()
            args = inputs(rng, frontiers(slots), live, heads, kv_heads, dim, slots, columns)
            got = self.attend(*args, causal=causal)
            np.testing.assert_allclose(got, oracle(*args, causal), **FLOAT32)

    @pytest.mark.parametrize("causal", [False, True])
    def test_bfloat16(self, causal):
        rng = np.random.default_rng(1)
        live = [5, 3, 5, 0, 5, 1]
        args = inputs(rng, frontiers(6), live, 4, 2, 16, 6, 5, dtype=jnp.bfloat16)
        got = self.attend(*args, causal=causal)
        np.testing.assert_allclose(got, oracle(*args, causal), **BFLOAT16)

    def test_float16_ring_values_under_bfloat16_queries(self):
        rng = np.random.default_rng(2)
        args = list(inputs(rng, [7, 2], [4, 2], 4, 2, 16, 6, 4, dtype=jnp.bfloat16))
        args[4] = args[4].astype(jnp.float16)
        np.testing.assert_allclose(
            self.attend(*args, causal=False), oracle(*args, False), **BFLOAT16
        )

    @pytest.mark.parametrize(
        "causal, seen",
        [
            (False, {8: (5, 11), 10: (7, 12), 12: (9, 12)}),
            (True, {8: (5, 8), 10: (7, 10), 12: (9, 12)}),
        ],
    )
    def test_worked_example_of_what_a_query_sees(self, causal, seen):
        # Window 4, anchor at 8, block 8..12. Queries are zero, so that weights are uniform over
        # what is seen; the value of position p is the unit vector p.
        unit = np.eye(16, dtype=np.float32)
        ring_value = np.full((2, 1, 4, 1, 16), np.nan, np.float32)
        for p in range(4, 8):
            ring_value[LAYER, 0, p % 4, 0] = unit[p]
        block = np.zeros((1, 5, 1, 16), np.float32)
        got = self.attend(
            block,
            block,
            unit[None, 8:13, None],
            np.zeros_like(ring_value),
            ring_value,
            jnp.array([8]),
            jnp.array([5]),
            causal=causal,
        )
        for position, (first, last) in seen.items():
            positions = np.flatnonzero(got[0, position - 8, 0])
            np.testing.assert_array_equal(positions, np.arange(first, last + 1))

    @pytest.mark.parametrize("causal", [False, True])
    def test_wide_window_equals_full_attention(self, causal):
        # 9 context positions and 4 columns in a ring of 16: the paged op, which knows no
        # window, must agree. One page holds the context in order.
        rng = np.random.default_rng(3)
        args = inputs(rng, [9, 3], [4, 3], 4, 2, 8, 16, 4)
        q, block_key, block_value, ring_key, ring_value, frontier, live = args
        full = jax.jit(functools.partial(paged_attention, layer=LAYER, causal=causal))(
            q,
            block_key,
            block_value,
            ring_key,
            ring_value,
            jnp.array([[0], [1]]),
            frontier,
            live,
        )
        np.testing.assert_allclose(self.attend(*args, causal=causal), full, **FLOAT32)

    def test_explicit_scale(self):
        args = inputs(np.random.default_rng(4), [5], [3], 2, 1, 8, 4, 3)
        got = self.attend(*args, causal=False, scale=0.5)
        np.testing.assert_allclose(got, oracle(*args, False, scale=0.5), **FLOAT32)

    def test_rows_do_not_depend_on_each_other(self):
        # Bit for bit: under a permutation of the rows, and with NaN live in another row.
        rng = np.random.default_rng(5)
        args = inputs(rng, frontiers(6), [4, 0, 1, 3, 4, 2], 4, 2, 8, 6, 4)
        plain = self.attend(*args, causal=False)
        order = np.array([3, 0, 5, 1, 4, 2])
        permuted = [x[:, order] if x.ndim == 5 else x[order] for x in args]
        np.testing.assert_array_equal(self.attend(*permuted, causal=False), plain[order])
        poisoned = list(args)
        poisoned[1] = args[1].at[4].set(jnp.nan)
        others = np.array([0, 1, 2, 3, 5])
        got = self.attend(*poisoned, causal=False)
        np.testing.assert_array_equal(got[others], plain[others])
        assert np.isnan(got[4]).all()


reference = functools.partial(sliding_window_attention, implementation="reference")


class TestReference(SlidingWindowAttentionCases):
    function = reference


# Columns, query and key heads, head dimension, slots. The kernel steps through 64 positions (32 of
# 128 dimensions in float32, 16 of 256) and starts a second program beyond 256.
SWEEP = [
    (1, 4, 4, 64, 64),  # 63 positions are seen at most
    (2, 4, 1, 64, 65),  # exactly one step
    (17, 8, 2, 64, 66),  # one position more; two query tiles
    (16, 6, 2, 96, 97),  # odd sizes padded inside
    (8, 2, 1, 128, 34),
    (5, 2, 1, 256, 31),
    (8, 4, 2, 64, 257),  # exactly one program along the ring
    (3, 3, 1, 64, 530),  # three of them
]


class SweepCases:
    """Backends against the reference at sizes that are too large for loops."""

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("columns, heads, kv_heads, dim, slots", SWEEP)
    def test_equals_reference(self, columns, heads, kv_heads, dim, slots, dtype):
        if dtype == "bfloat16" and slots % 2:
            pytest.skip("half the sweep is enough for the other dtype")
        rng = np.random.default_rng(8)
        live = [columns, columns // 2, columns, 1, columns, 0, (columns + 1) // 2]
        args = list(
            inputs(rng, [*frontiers(slots), 2], live, heads, kv_heads, dim, slots, columns, dtype)
        )
        if dtype == "bfloat16":
            args[4] = args[4].astype(jnp.float16)  # as the rings of a bfloat16 model
        got = self.attend(*args)
        # The same numbers in float32, so that only one side is rounded.
        args = (*(x.astype(jnp.float32) for x in args[:5]), *args[5:])
        expected = jax.jit(reference, static_argnames="layer")(*args, layer=LAYER)
        tolerance = FLOAT32 if dtype == "float32" else BFLOAT16
        np.testing.assert_allclose(got, expected, **tolerance)


class TestPallas(SlidingWindowAttentionCases, SweepCases):
    function = functools.partial(sliding_window_attention, implementation="pallas_interpret")

    def test_a_row_is_the_same_in_every_batch(self):
        # To the bit: the kernel's cut does not look at the batch.
        rng = np.random.default_rng(9)
        args = inputs(rng, [700, 40, 299], [3, 3, 2], 3, 1, 64, 530, 3)
        alone = [x[:, 1:2] if x.ndim == 5 else x[1:2] for x in args]
        np.testing.assert_array_equal(self.attend(*alone), self.attend(*args)[1:2])

    def test_gradient_is_that_of_the_xla_form(self):
        args = inputs(np.random.default_rng(6), [0, 9], [3, 2], 4, 2, 8, 6, 4)

        tensors = (jnp.nan_to_num(args[0]), *args[1:5])  # dead queries aside
        expected = attention_gradients(TestXla.function, tensors, args[5:], LAYER)
        got = attention_gradients(self.function, tensors, args[5:], LAYER)
        # Through the cosine of outputs that differ by a few ulps.
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, other, **FLOAT32)


class TestXla(SlidingWindowAttentionCases, SweepCases):
    function = functools.partial(sliding_window_attention, implementation="xla")

    def test_gradients_ignore_dead_memory(self):
        rng = np.random.default_rng(6)
        args = inputs(rng, [0, 9], [3, 2], 4, 2, 8, 6, 4)
        clean = [jnp.nan_to_num(x) for x in args]

        expected = attention_gradients(reference, clean[:5], args[5:], LAYER)
        dead_queries_aside = [clean[0], *args[1:5]]
        got = attention_gradients(self.function, dead_queries_aside, args[5:], LAYER)
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, other, **FLOAT32)


class TestApi:
    def args(self):
        return list(inputs(np.random.default_rng(7), [3, 4], [2, 3], 4, 2, 8, 6, 3))

    @pytest.mark.parametrize("name", ["triton", "XLA", "mosaic"])
    def test_named_implementation_is_refused_not_replaced(self, name):
        with pytest.raises(ValueError, match=f"{name}.*pallas, reference, xla"):
            sliding_window_attention(*self.args(), layer=0, implementation=name)

    def test_kernel_is_refused_without_a_gpu(self):
        with pytest.raises(ValueError, match="pallas.*sliding_window_attention.*no CUDA device"):
            sliding_window_attention(*self.args(), layer=0, implementation="pallas")

    @pytest.mark.parametrize(
        "index, name, shape",
        [
            (0, "q", (2, 3, 4)),
            (0, "q", (2, 3, 5, 8)),
            (1, "block_key", (2, 4, 2, 8)),
            (2, "block_value", (2, 3, 1, 8)),
            (3, "ring_key", (2, 1, 6, 2, 8)),
            (4, "ring_value", (2, 2, 7, 2, 8)),
            (5, "frontier", (1,)),
            (6, "live", (2, 1)),
        ],
    )
    def test_shape_errors_name_the_argument(self, index, name, shape):
        args = self.args()
        args[index] = jnp.zeros(shape)
        with pytest.raises(ValueError, match=rf"{name}: got .*expected"):
            sliding_window_attention(*args, layer=0)

    @pytest.mark.parametrize("layer", [-1, 2])
    def test_layer_out_of_range(self, layer):
        with pytest.raises(ValueError, match=f"layer: got {layer}"):
            sliding_window_attention(*self.args(), layer=layer)
