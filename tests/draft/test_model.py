"""The draft model: who sees whom in a block, rotation, initialisation, published geometries."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import Causality, DraftConfig, parse_draft_config
from dflash_jax.config.draft import FULL, SLIDING
from dflash_jax.draft.context import attend_context
from dflash_jax.draft.model import DraftModel
from dflash_jax.io.names import tensor_table
from dflash_jax.state.paged import PagedKV
from dflash_jax.state.ring import RingKV
from dflash_jax.state.sequence import DraftContext, init_context
from pallas_kernels.candidate_selector import candidate_selector
from pallas_kernels.elementary import stable_top_k

DFLASH = DraftConfig(
    dflash2=False,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    layer_types=(SLIDING, FULL),
    sliding_window=4,
    target_layer_ids=(0, 2),
    mask_token_id=7,
    block_size=5,
    vocab_size=32,
)
DFLASH2 = dataclasses.replace(
    DFLASH,
    dflash2=True,
    conv_kernel_size=2,
    conv_group_size=6,
    selector_rank=3,
    selector_top_k=4,
)


def init(config, dtype=jnp.float32):
    """Key -> fresh parameters of every part of the model."""
    model = DraftModel(config, dtype)
    width = len(config.target_layer_ids) * config.hidden_size

    def touch(model):
        model.context(jnp.zeros((1, 1, width), dtype))
        block = jnp.zeros((1, 2, config.hidden_size), dtype)
        hidden = model(block, jnp.arange(2)[None], lambda layer, query, key, value: query)
        return model.select(hidden) if config.dflash2 else hidden

    return lambda key: model.init(key, method=touch)["params"]


def random_params(config, seed=0):
    """Parameters of a draft in which every part matters."""
    rng, params = np.random.default_rng(seed), {}
    for spec in tensor_table(config):
        gain = len(spec.shape) == 1
        std = 0.3 if gain else spec.shape[-1] ** -0.5
        node = params
        for name in spec.path[:-1]:
            node = node.setdefault(name, {})
        value = rng.normal(float(gain), std, size=spec.shape)
        node[spec.path[-1]] = jnp.asarray(value, jnp.float32)
    return params


def random_context(config, rng, rows, capacity=16, page_size=4):
    context = init_context(config, rows, capacity, page_size, jnp.float32)
    normal = [jnp.float32(rng.normal(size=x.shape)) for x in (*context.ring, *context.pages[:2])]
    ring, (key, value) = RingKV(*normal[:2]), normal[2:]
    return DraftContext(ring, context.pages._replace(key=key, value=value))


def run_block(config, params, embeddings, frontier, live, context):
    """Op by op: the shapes of all these tests agree, so that hardly anything is compiled."""
    positions = frontier[:, None] + jnp.arange(embeddings.shape[1])
    attend = attend_context(config, context, frontier, live)
    return DraftModel(config).apply({"params": params}, embeddings, positions, attend)


# --- who sees whom ---


def visible(config, layer, frontier, live, columns):
    """Per column, the positions whose values reach its attention output.

    Scores are equal and the value at position p is the p-th unit vector.
    """
    heads, dim = config.num_key_value_heads, config.head_dim
    unit = np.eye(dim, dtype=np.float32)
    assert frontier + columns <= dim
    ring = pages = None
    if config.local_layers:
        slots = config.sliding_window
        value = np.full((len(config.local_layers), 1, slots, heads, dim), np.nan, np.float32)
        for p in range(max(0, frontier - slots), frontier):
            value[:, :, p % slots] = unit[p]
        ring = RingKV(np.zeros_like(value), value)
    if config.full_layers:
        page = 4
        shape = (len(config.full_layers), dim // page, page, heads, dim)
        value = np.full(shape, np.nan, np.float32)
        for p in range(frontier):
            value[:, p // page, p % page] = unit[p]
        table = np.arange(dim // page, dtype=np.int32)[None]
        pages = PagedKV(jnp.zeros(shape), jnp.asarray(value), jnp.asarray(table))
    attend = attend_context(
        config, DraftContext(ring, pages), jnp.array([frontier]), jnp.array([live])
    )
    query = np.zeros((1, columns, config.num_attention_heads, dim), np.float32)
    value = np.repeat(unit[frontier : frontier + columns, None], heads, axis=1)[None]
    output = np.asarray(attend(layer, query, np.zeros_like(value), value))[0]
    assert (output == output[:, :1]).all()
    return [set(np.flatnonzero(column)) for column in output[:, 0]]


def span(first, last):
    return set(range(first, last + 1))


@pytest.mark.parametrize("layer_types", [(SLIDING, FULL), (FULL, SLIDING)])
@pytest.mark.parametrize("causality", list(Causality))
def test_window_and_causality_of_each_layer(causality, layer_types):
    # Window 4, anchor at 8, block 8..12.
    config = dataclasses.replace(DFLASH, causality=causality, layer_types=layer_types)
    sliding = {
        True: [span(5, 8), span(6, 9), span(7, 10), span(8, 11), span(9, 12)],
        False: [span(5, 11), span(6, 12), span(7, 12), span(8, 12), span(9, 12)],
    }
    full = {
        True: [span(0, 8 + column) for column in range(5)],
        False: [span(0, 12)] * 5,
    }
    causal = {
        Causality.NON_CAUSAL: (False, False),
        Causality.CAUSAL: (True, True),
        Causality.SLIDING_CAUSAL: (True, False),
    }[causality]
    for layer, kind in enumerate(layer_types):
        expected = sliding[causal[0]] if kind == SLIDING else full[causal[1]]
        assert visible(config, layer, frontier=8, live=5, columns=5) == expected, kind


def test_dead_columns_are_no_keys():
    for layer, expected in ((0, [span(5, 10), span(6, 10), span(7, 10)]), (1, [span(0, 10)] * 3)):
        assert visible(DFLASH, layer, frontier=8, live=3, columns=5) == [*expected, set(), set()]


def test_a_window_longer_than_everything_is_no_window():
    config = dataclasses.replace(DFLASH, sliding_window=20)
    assert visible(config, 0, 8, 5, 5) == visible(config, 1, 8, 5, 5) == [span(0, 12)] * 5


@pytest.mark.parametrize("config", [DFLASH, DFLASH2], ids=["DFlash", "DFlash2"])
def test_the_anchor_reaches_every_proposal(config):
    # Two rows with the same masks and other anchors. Window 8 > block.
    config = dataclasses.replace(config, sliding_window=8)
    rng = np.random.default_rng(1)
    ring, pages = random_context(config, rng, 2)
    ring = RingKV(*(jnp.stack([x[:, 0]] * 2, axis=1) for x in ring))
    table = jnp.stack([pages.block_table[0]] * 2)
    context = DraftContext(ring, pages._replace(block_table=table))
    block = np.broadcast_to(rng.normal(size=config.hidden_size), (2, 5, config.hidden_size))
    block = np.float32(block)
    frontier, live = jnp.array([9, 9]), jnp.array([5, 5])
    params = random_params(config)
    same = np.asarray(run_block(config, params, block, frontier, live, context))
    np.testing.assert_array_equal(same[0], same[1])
    block[1, 0] = rng.normal(size=config.hidden_size)
    hidden = np.asarray(run_block(config, params, block, frontier, live, context))
    assert (np.abs(hidden[0] - hidden[1]).max(axis=-1) > 1e-2).all()
    # Equal masks differ by their position only, and do differ.
    assert np.abs(hidden[0, 1] - hidden[0, 2]).max() > 1e-2


@pytest.mark.parametrize("causality", list(Causality))
def test_what_the_last_column_changes(causality):
    # A local and a full layer: only where every layer is causal does it not reach the first.
    config = dataclasses.replace(DFLASH, causality=causality)
    rng = np.random.default_rng(2)
    params, context = random_params(config), random_context(config, rng, 2)
    block = rng.normal(size=(2, 5, config.hidden_size)).astype(np.float32)
    args = (jnp.array([6, 13]), jnp.array([5, 3]), context)
    before = np.asarray(run_block(config, params, block, *args))
    for row, last in enumerate((4, 2)):
        changed = block.copy()
        changed[row, last] += 1
        change = np.abs(np.asarray(run_block(config, params, changed, *args)) - before)
        moved = change.max(axis=-1) > 1e-3
        assert not moved[1 - row].any()
        if causality is Causality.CAUSAL:
            np.testing.assert_array_equal(np.flatnonzero(change[row].max(axis=-1)), [last])
        else:
            assert moved[row, : last + 1].all()


# --- rotation and input ---


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_rotation_is_the_drafts_own(factor):
    # Half-split over the first dimensions, theta of the draft, scalar positions; nothing of the
    # target's partial three-axis rotation. Without a rotation (position 0) as the base.
    config = dataclasses.replace(
        DFLASH, num_hidden_layers=1, layer_types=(FULL,), partial_rotary_factor=factor
    )
    params = random_params(config)
    token = np.random.default_rng(3).normal(size=config.hidden_size).astype(np.float32)
    block = np.broadcast_to(token, (1, 6, config.hidden_size))
    positions = jnp.array([[0, 1, 2, 31, 500, 4000]])
    seen = {}

    def attend(layer, query, key, value):
        seen.update(query=np.asarray(query)[0], key=np.asarray(key)[0])
        return query

    DraftModel(config).apply({"params": params}, block, positions, attend)
    rotary = int(config.head_dim * factor)
    half = rotary // 2
    frequency = config.rope_theta ** (-2 * np.arange(half) / rotary)
    angle = np.asarray(positions)[0][:, None, None] * frequency
    for heads in seen.values():
        base = np.float64(heads[:1])
        first, second = base[..., :half], base[..., half:rotary]
        np.testing.assert_array_equal(heads[..., rotary:], np.repeat(heads[:1], 6, 0)[..., rotary:])
        # Angles up to 4000 radians: float32 holds them to 2e-4.
        for got, wanted in (
            (heads[..., :half], first * np.cos(angle) - second * np.sin(angle)),
            (heads[..., half:rotary], second * np.cos(angle) + first * np.sin(angle)),
        ):
            np.testing.assert_allclose(got[:4], wanted[:4], rtol=0, atol=2e-5)
            np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-3)


def test_input_embedding_scale():
    rng = np.random.default_rng(4)
    params, context = random_params(DFLASH), random_context(DFLASH, rng, 2)
    block = rng.normal(size=(2, 5, DFLASH.hidden_size)).astype(np.float32)
    args = (jnp.array([5, 9]), jnp.array([5, 5]), context)
    scaled = dataclasses.replace(DFLASH, input_embedding_scale=4.0)
    got = run_block(scaled, params, block, *args)
    np.testing.assert_array_equal(got, run_block(DFLASH, params, 4 * block, *args))
    assert np.abs(got - run_block(DFLASH, params, block, *args)).max() > 0.1


# --- initialisation ---


def test_untrained_dflash2_is_dflash():
    rng = np.random.default_rng(5)
    params = jax.jit(init(DFLASH2))(jax.random.key(0))
    own = {spec.path for spec in tensor_table(DFLASH)}
    paths = jax.tree_util.tree_leaves_with_path(params)
    shared = {}
    for path, leaf in paths:
        names = tuple(part.key for part in path)
        if names in own:
            node = shared
            for name in names[:-1]:
                node = node.setdefault(name, {})
            node[names[-1]] = leaf
    assert len(jax.tree.leaves(shared)) == len(own) < len(paths)
    context = random_context(DFLASH, rng, 2)
    block = rng.normal(size=(2, 5, DFLASH.hidden_size)).astype(np.float32)
    args = (block, jnp.array([3, 11]), jnp.array([5, 4]), context)
    hidden = run_block(DFLASH2, params, *args)
    np.testing.assert_array_equal(hidden, run_block(DFLASH, shared, *args))
    assert np.abs(hidden).max() > 0.5

    # The walk of an untrained selector is each column's argmax.
    scores = jnp.asarray(rng.normal(size=(2, 4, DFLASH2.vocab_size)), jnp.float32)
    projected, predecessor, successor = DraftModel(DFLASH2).apply(
        {"params": params}, hidden[:, 1:], method="select"
    )
    assert np.abs(projected).max() > 0.1 and np.abs(predecessor).max() > 0.1
    unary, candidates = stable_top_k(scores, DFLASH2.selector_top_k)
    tokens, _, _ = candidate_selector(
        unary, candidates, projected, predecessor, successor,
        jnp.array([1, 2]), jnp.zeros(2), jnp.zeros((2, 4)),
    )  # fmt: skip
    np.testing.assert_array_equal(tokens, np.argmax(scores, axis=-1))


# --- published geometries ---


@pytest.mark.parametrize(
    "name, parameters, leaves",
    [
        ("qwen3.8-27b-dflash2", 1_924_404_480, 81),
        ("qwen3.6-35b-a3b-dflash", 385_906_176, 69),
        ("qwen3.6-27b-dflash", None, 58),
    ],
)
def test_published_geometry(geometries, name, parameters, leaves):
    config = parse_draft_config(geometries / f"{name}.json")
    shapes = jax.eval_shape(init(config, jnp.bfloat16), jax.random.key(0))
    found = {
        tuple(part.key for part in path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
    }
    assert found == {spec.path: spec.shape for spec in tensor_table(config)}
    assert len(found) == leaves
    if parameters is not None:
        assert sum(int(np.prod(shape)) for shape in found.values()) == parameters


def test_ring_image_of_the_published_dflash2(geometries):
    # 5 layers * (2-byte K + 2-byte V) * 8 heads * 128 * 2048 = 40 MiB, and no pool of pages.
    config = parse_draft_config(geometries / "qwen3.8-27b-dflash2.json")
    make = functools.partial(init_context, config, 1, 1 << 20, 64, jnp.bfloat16)
    context = jax.eval_shape(make)
    assert context.pages is None
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(context))
    assert size == 40 * 2**20
    # The other one: five rings of 4096 and one paged layer.
    config = parse_draft_config(geometries / "qwen3.6-35b-a3b-dflash.json")
    context = jax.eval_shape(functools.partial(init_context, config, 1, 128, 64, jnp.bfloat16))
    assert context.ring.key.shape[:3] == (5, 1, 4096)
    assert context.pages.key.shape[:3] == (1, 2, 64)
