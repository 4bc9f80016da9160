"""Every bit of the weights and every field of the configuration is in the name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.io.fingerprint import fingerprint
from tests.decoding import tiny

PAIR = tiny.pair(tiny.DFLASH2, target=tiny.SMALL)
NAMES = fingerprint(PAIR, True)


def differing(**changes) -> list[str]:
    other = fingerprint(dataclasses.replace(PAIR, **changes), True)
    return [name for name in sorted(NAMES) if other[name] != NAMES[name]]


def test_equal_pairs_have_equal_names():
    copied = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), PAIR.target_params)
    assert differing(target_params=copied) == []
    assert fingerprint(PAIR, False) == NAMES | {"draft": "none"}


def test_every_leaf_counts():
    """The last bit of one element, and two elements changing places, wherever they are."""
    rng = np.random.default_rng(0)
    for field, name in (("target_params", "target"), ("draft_params", "draft")):
        leaves, tree = jax.tree.flatten(getattr(PAIR, field))
        for index, leaf in enumerate(leaves):
            flat = np.asarray(leaf).reshape(-1)
            place, other = rng.choice(flat.size, 2, replace=flat.size < 2)
            bit = flat.copy()
            bit[place] = np.nextafter(bit[place], np.inf)
            changes = [bit]
            if flat[place] != flat[other]:
                swapped = flat.copy()
                swapped[[place, other]] = flat[[other, place]]
                changes.append(swapped)
            for changed in changes:
                new = [
                    *leaves[:index],
                    jnp.asarray(changed.reshape(leaf.shape)),
                    *leaves[index + 1 :],
                ]
                assert differing(**{field: tree.unflatten(new)}) == [name]


def test_configuration_dtype_and_head_count():
    config = dataclasses.replace(PAIR.target, rms_norm_eps=2e-6)
    assert differing(target=config) == ["target"]
    assert differing(draft=dataclasses.replace(PAIR.draft, sliding_window=9)) == ["draft"]
    assert differing(dtype="bfloat16") == ["dtype"]
    assert differing(context_dtype="bfloat16") == ["draft"]
    assert differing(context_role={"k": jnp.ones(3)}) == ["draft"]
    rows = np.arange(10)
    assert differing(proposal_rows=rows) == ["draft"]
