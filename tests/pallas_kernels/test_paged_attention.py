"""paged_attention against float64 loops over absolute positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention, xla
from tests.pallas_kernels.tools import attention_gradients

# float32 sums of up to some hundred unit terms with weights that sum to 1.
FLOAT32 = dict(rtol=1e-5, atol=1e-5)
# The output is rounded to 8 significant bits; numbers are at most about 3. The kernel also rounds
# its weights to the values' dtype: half an ulp of each term at most.
BFLOAT16 = dict(rtol=2**-8, atol=2**-8)

LAYER = 1


def oracle(
    q, block_key, block_value, key_pages, value_pages, table, lengths, live, causal, tree=None
):
    q, block_key, block_value, key_pages, value_pages = (
        np.asarray(x, np.float64) for x in (q, block_key, block_value, key_pages, value_pages)
    )
    rows, _, heads, dim = q.shape
    page, kv_heads = key_pages.shape[2:4]
    output = np.zeros(q.shape)
    for b in range(rows):
        keys = [key_pages[LAYER, table[b, p // page], p % page] for p in range(int(lengths[b]))]
        values = [value_pages[LAYER, table[b, p // page], p % page] for p in range(lengths[b])]
        for i in range(int(live[b])):
            if tree is None:
                seen = range(i + 1 if causal else int(live[b]))
            else:
                seen = [a for a in range(int(live[b])) if int(tree[b, i]) >> a & 1]
            key = np.array([*keys, *block_key[b, seen]])
            value = np.array([*values, *block_value[b, seen]])
            for h in range(heads):
                k = h // (heads // kv_heads)
                scores = key[:, k] @ q[b, i, h] / np.sqrt(dim)
                weights = np.exp(scores - scores.max())
                output[b, i, h] = (weights / weights.sum()) @ value[:, k]
    return output


def inputs(rng, lengths, live, heads, kv_heads, dim, page, max_pages, tokens, dtype=np.float32):
    """Random tensors; NaN in all that is not reached, nonsense in unused table entries."""
    rows = len(lengths)
    used = [-(-length // page) for length in lengths]
    pages = sum(used) + 3
    q = rng.normal(size=(rows, tokens, heads, dim))
    block_key, block_value = rng.normal(size=(2, rows, tokens, kv_heads, dim))
    key_pages, value_pages = np.full((2, 2, pages, page, kv_heads, dim), np.nan)
    nonsense = [-1, pages, 2**31 - 1, -(2**31), 0]
    table = np.resize(nonsense, (rows, max_pages))
    free = iter(rng.permutation(pages))
    for b in range(rows):
        for tensor in (q, block_key, block_value):
            tensor[b, live[b] :] = np.nan
        for index in range(used[b]):
            table[b, index] = next(free)
            filled = min(page, lengths[b] - index * page)
            for pool in (key_pages, value_pages):
                pool[LAYER, table[b, index], :filled] = rng.normal(size=(filled, kv_heads, dim))
    tensors = (jnp.asarray(x, dtype) for x in (q, block_key, block_value, key_pages, value_pages))
    return (*tensors, *(jnp.asarray(x, jnp.int32) for x in (table, lengths, live)))


def random_trees(rng, rows, tokens):
    """Ancestor masks `[rows, tokens]` of random trees, as Python integers below 2**32."""
    masks = np.zeros((rows, tokens), object)
    for b in range(rows):
        for c in range(tokens):
            parent = masks[b, rng.integers(c)] if c else 0
            masks[b, c] = parent | 1 << c
    return masks


class PagedAttentionCases:
    """Every backend inherits these; `function` is the op with its implementation bound."""

    function = None

    def attend(self, *args, **options):
        run = jax.jit(self.function, static_argnames=("layer", "causal", "scale"))
        output = run(*args, layer=LAYER, **options)
        assert output.dtype == args[0].dtype
        return np.asarray(output, np.float32)

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(
        "heads, kv_heads, dim, page, max_pages, tokens",
        [(4, 2, 8, 4, 5, 4), (6, 2, 20, 3, 6, 5), (3, 3, 24, 5, 4, 7), (4, 1, 96, 8, 3, 1)],
    )
    def test_equals_loops_over_positions(
        self, heads, kv_heads, dim, page, max_pages, tokens, causal
    ):
        rng = np.random.default_rng(0)
        lengths = [0, 1, page - 1, page, page + 1, max_pages * page]
        for shift in range(2):
            live = np.roll([tokens, 0, 1, tokens - 1, tokens, (tokens + 1) // 2], shift).tolist()
            args = inputs(rng, lengths, live, heads, kv_heads, dim, page, max_pages, tokens)
            got = self.attend(*args, causal=causal)
            np.testing.assert_allclose(got, oracle(*args, causal), **FLOAT32)

    @pytest.mark.parametrize("causal", [False, True])
    def test_long_table(self, causal):
        # Longer than the XLA form handles at once, lengths around its chunk border, and a page
        # size that divides neither the chunk nor the table.
        rng = np.random.default_rng(1)
        border = xla.CHUNK // 12 * 12
        lengths = [0, 1, border - 1, border, border + 1, 600]
        live = [3, 2, 0, 3, 1, 3]
        args = inputs(rng, lengths, live, 4, 2, 8, 12, 53, 3)
        got = self.attend(*args, causal=causal)
        np.testing.assert_allclose(got, oracle(*args, causal), **FLOAT32)

    def test_bfloat16(self):
        rng = np.random.default_rng(2)
        args = inputs(rng, [0, 5, 12], [4, 2, 3], 4, 2, 16, 4, 3, 4, dtype=jnp.bfloat16)
        np.testing.assert_allclose(self.attend(*args), oracle(*args, True), **BFLOAT16)

    def test_causal_block_hides_later_columns(self):
        args = list(inputs(np.random.default_rng(3), [6, 2], [4, 4], 4, 2, 8, 4, 2, 4))
        plain = self.attend(*args)  # causal is the default
        args[1], args[2] = (x.at[:, 3].set(9.0) for x in args[1:3])
        np.testing.assert_array_equal(self.attend(*args)[:, :3], plain[:, :3])

    @pytest.mark.parametrize(
        "tokens, page, max_pages, dtype", [(6, 4, 5, "uint32"), (32, 12, 53, "int32")]
    )
    def test_tree(self, tokens, page, max_pages, dtype):
        # 32 columns use the sign bit. The second table is longer than XLA handles at once.
        rng = np.random.default_rng(8)
        lengths = [0, page + 1, max_pages * page - 5]
        live = [tokens, tokens - 3, tokens]
        args = inputs(rng, lengths, live, 4, 2, 8, page, max_pages, tokens)
        tree = random_trees(rng, 3, tokens)
        ancestors = jnp.asarray(np.array(tree, np.uint32).view(dtype))
        got = self.attend(*args, ancestors=ancestors)
        np.testing.assert_allclose(got, oracle(*args, True, tree), **FLOAT32)

    def test_tree_of_a_chain_is_the_causal_block(self):
        # A tree of one path reaches the same operations in the same order.
        args = inputs(np.random.default_rng(9), [5, 0, 8], [4, 3, 2], 4, 2, 8, 4, 2, 4)
        chain = jnp.broadcast_to(2 ** (jnp.arange(4) + 1) - 1, (3, 4))
        got = self.attend(*args, ancestors=chain)
        np.testing.assert_array_equal(got, self.attend(*args, causal=True))

    @pytest.mark.parametrize("max_pages", [6, 80])
    def test_rows_do_not_depend_on_each_other(self, max_pages):
        # Bit for bit, also where the longest row decides how far a loop goes.
        rng = np.random.default_rng(4)
        lengths = [3, 24, 11, 0]
        args = inputs(rng, lengths, [4, 3, 1, 4], 4, 2, 8, 4, max_pages, 4)
        plain = self.attend(*args)
        order = np.array([2, 0, 3, 1])
        permuted = [x if x.ndim == 5 else x[order] for x in args]
        np.testing.assert_array_equal(self.attend(*permuted), plain[order])
        shorter = list(args)
        shorter[6] = args[6].at[1].set(1)
        kept = np.array([0, 2, 3])
        np.testing.assert_array_equal(self.attend(*shorter)[kept], plain[kept])


reference = functools.partial(paged_attention, implementation="reference")


class TestReference(PagedAttentionCases):
    function = reference


# Tokens, query and key heads, head dimension, page size, pages. The kernel steps through 64
# positions (32 of 128 dimensions in float32, 16 of 256) and starts a second program beyond 256.
SWEEP = [
    (1, 4, 4, 64, 16, 4),  # exactly one step
    (17, 8, 2, 64, 16, 5),  # two query tiles
    (16, 6, 1, 96, 24, 3),  # odd sizes padded inside
    (2, 2, 1, 128, 3, 11),
    (5, 6, 1, 256, 8, 4),
    (8, 2, 2, 64, 64, 9),  # three programs along the context
    (70, 2, 1, 64, 32, 3),  # a prefill chunk: query tiles, and several steps through the block
]


class SweepCases:
    """Backends against the reference at sizes that are too large for loops."""

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("tokens, heads, kv_heads, dim, page, max_pages", SWEEP)
    def test_equals_reference(self, tokens, heads, kv_heads, dim, page, max_pages, dtype):
        causal = page != 24
        if dtype == "bfloat16" and dim not in (64, 256):
            pytest.skip("half the sweep is enough for the other dtype")
        rng = np.random.default_rng(10)
        full = page * max_pages
        lengths = [0, page - 1, page, page + 1, full // 2 + 1, full - 1, full]
        live = [tokens, tokens // 2, tokens, 1, tokens, 0, (tokens + 1) // 2]
        args = inputs(
            rng, lengths, live, heads, kv_heads, dim, page, max_pages, tokens, jnp.dtype(dtype)
        )
        got = self.attend(*args, causal=causal)
        # The same numbers in float32, so that only one side is rounded.
        args = (*(x.astype(jnp.float32) for x in args[:5]), *args[5:])
        expected = jax.jit(reference, static_argnames=("layer", "causal"))(
            *args, layer=LAYER, causal=causal
        )
        tolerance = FLOAT32 if dtype == "float32" else BFLOAT16
        np.testing.assert_allclose(got, expected, **tolerance)


class TestPallas(PagedAttentionCases, SweepCases):
    function = functools.partial(paged_attention, implementation="pallas_interpret")

    def test_a_row_is_the_same_in_every_batch(self):
        # To the bit: the kernel's cut does not look at the batch.
        rng = np.random.default_rng(11)
        args = inputs(rng, [600, 40, 299], [3, 3, 2], 3, 1, 64, 12, 53, 3)
        alone = [x if x.ndim == 5 else x[1:2] for x in args]
        np.testing.assert_array_equal(self.attend(*alone), self.attend(*args)[1:2])

    def test_gradient_is_that_of_the_xla_form(self):
        args = inputs(np.random.default_rng(5), [0, 5], [3, 2], 4, 2, 8, 4, 3, 4)

        tensors = (jnp.nan_to_num(args[0]), *args[1:5])  # dead queries aside
        expected = attention_gradients(TestXla.function, tensors, args[5:], LAYER)
        got = attention_gradients(self.function, tensors, args[5:], LAYER)
        # Through the cosine of outputs that differ by a few ulps.
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, other, **FLOAT32)


class TestXla(PagedAttentionCases, SweepCases):
    function = functools.partial(paged_attention, implementation="xla")

    def test_long_rows_leave_short_ones_alone_to_the_bit(self):
        # The loop runs as far as the longest row needs: three chunks or one, for row 0.
        rng = np.random.default_rng(6)
        args = list(inputs(rng, [30, 700], [3, 3], 4, 2, 8, 16, 48, 3))
        both = self.attend(*args)
        args[6] = args[6].at[1].set(5)
        np.testing.assert_array_equal(self.attend(*args)[0], both[0])

    def test_gradients_ignore_dead_memory(self):
        args = inputs(np.random.default_rng(5), [0, 5], [3, 2], 4, 2, 8, 4, 3, 4)
        clean = [jnp.nan_to_num(x) for x in args[:5]]

        expected = attention_gradients(reference, clean[:5], args[5:], LAYER)
        dead_queries_aside = [clean[0], *args[1:5]]
        got = attention_gradients(self.function, dead_queries_aside, args[5:], LAYER)
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, other, **FLOAT32)


class TestApi:
    def args(self):
        return list(inputs(np.random.default_rng(7), [3, 4], [2, 3], 4, 2, 8, 4, 2, 3))

    @pytest.mark.parametrize("name", ["triton", "XLA"])
    def test_named_implementation_is_refused_not_replaced(self, name):
        with pytest.raises(ValueError, match=f"{name}.*pallas, reference, xla"):
            paged_attention(*self.args(), layer=0, implementation=name)

    def test_kernel_is_refused_without_a_gpu(self):
        with pytest.raises(ValueError, match="pallas.*paged_attention.*no CUDA device"):
            paged_attention(*self.args(), layer=0, implementation="pallas")

    @pytest.mark.parametrize(
        "options, message",
        [
            (dict(ancestors=jnp.ones((2, 4), jnp.int32)), "ancestors: got shape .*2, 3"),
            (dict(ancestors=jnp.ones((2, 3), jnp.int16)), "ancestors: got int16"),
            (dict(ancestors=jnp.ones((2, 3), jnp.int32), causal=False), "causal: got False"),
        ],
    )
    def test_ancestor_errors(self, options, message):
        with pytest.raises(ValueError, match=message):
            paged_attention(*self.args(), layer=0, **options)

    def test_a_tree_has_at_most_32_columns(self):
        args = inputs(np.random.default_rng(7), [3], [2], 2, 1, 8, 4, 2, 33)
        with pytest.raises(ValueError, match="33 columns, expected at most 32"):
            paged_attention(*args, layer=0, ancestors=jnp.ones((1, 33), jnp.int32))

    @pytest.mark.parametrize(
        "index, name, shape",
        [
            (0, "q", (2, 3, 5, 8)),
            (1, "block_key", (2, 3, 2, 7)),
            (2, "block_value", (2, 3, 1, 8)),
            (3, "key_pages", (2, 5, 4, 1, 8)),
            (4, "value_pages", (2, 2, 7, 2, 8)),
            (5, "block_table", (1, 2)),
            (6, "lengths", (1,)),
            (7, "live", (2, 1)),
        ],
    )
    def test_shape_errors_name_the_argument(self, index, name, shape):
        args = self.args()
        args[index] = jnp.zeros(shape)
        with pytest.raises(ValueError, match=rf"{name}: got .*expected"):
            paged_attention(*args, layer=0)
