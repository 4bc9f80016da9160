"""`load_pair`: which weights a role has, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import load_pair
from dflash_jax.decoding.generate import plan, prepare


def leaves(params):
    return {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(params)}


def test_context_and_query_block_share_their_weights_by_default():
    for same in (None, "bfloat16"):
        pair = load_pair(dtype="bfloat16", context_dtype=same)
        assert pair.context_role is None and pair.context_dtype is None
        assert "context" not in pair.describe()
        _, weights = plan(pair)
        assert weights.draft_context is weights.draft


@pytest.mark.parametrize(
    ("dtype", "context", "ring"),
    [
        ("bfloat16", "float32", ("float32", "float32")),
        ("float32", "bfloat16", ("bfloat16", "float16")),
    ],
)
def test_a_context_role_of_its_own(dtype, context, ring):
    """Its projections come from the file, unrounded by the other role; nothing else is doubled."""
    pair = load_pair("tiny", "tiny-dflash2", dtype, context_dtype=context)
    file = load_pair("tiny", "tiny-dflash2").draft_params  # the checkpoint is float32
    role, block = leaves(pair.context_role), leaves(pair.draft_params)
    assert len(role) == 2 * pair.draft.num_hidden_layers
    for name, weight in role.items():
        assert name.endswith(("['k_proj']['weight']", "['v_proj']['weight']"))
        assert weight.dtype == context and block[name].dtype == dtype
        exact = np.asarray(leaves(file)[name])
        np.testing.assert_array_equal(weight, exact.astype(jnp.dtype(context)))
        np.testing.assert_array_equal(block[name], exact.astype(jnp.dtype(dtype)))
    assert f"{dtype} with {context} context K/V" in pair.describe()
    _, weights = plan(pair)
    merged = leaves(weights.draft_context)
    assert all(merged[name] is role.get(name, block[name]) for name in block)
    job = prepare(pair, [[1, 2, 3]], max_new_tokens=1)
    assert (job.state.draft.ring.key.dtype, job.state.draft.ring.value.dtype) == ring
    assert job.state.pending.dtype == job.state.target.kv.key.dtype == dtype
    # Plain decoding has no draft, and so no context.
    spec, weights = plan(pair, 0)
    assert spec.context_dtype is None and weights.context_role is None


def test_what_is_refused():
    with pytest.raises(ValueError, match="context_dtype: got 'float16', expected one of float32"):
        load_pair(context_dtype="float16")
    with pytest.raises(ValueError, match="context_dtype: got 'bfloat16' without a draft"):
        load_pair("tiny", None, context_dtype="bfloat16")
    with pytest.raises(ValueError, match="dtype: got 'float8', expected one of"):
        load_pair(dtype="float8")
