"""Which models a saved state belongs to: a short name for configurations and weights together."""

import hashlib
import weakref

import jax
import jax.numpy as jnp

from dflash_jax.io.pair import Pair
from dflash_jax.typing import Array, Params, UInt32

_known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def fingerprint(pair: Pair, drafting: bool) -> dict[str, str]:
    """Names the target, the draft and the dtype of a pair; equal names mean equal states.

    The weights enter bit by bit, through checksums made where they lie; so it costs one reading
    of them, once per pair.

    Args:
      drafting: False leaves the draft out, as plain decoding does.
    """
    if pair not in _known:
        names = {"target": _name(pair.target, pair.target_params), "dtype": pair.dtype}
        if pair.draft is None:
            drafts = "none"
        else:
            role = (pair.context_dtype, pair.context_role)
            drafts = _name((pair.draft, role[0]), pair.draft_params, role[1], pair.proposal_rows)
        _known[pair] = names, drafts
    names, drafts = _known[pair]
    return names | {"draft": drafts if drafting else "none"}


def _name(config, params: Params, *more) -> str:
    digest = hashlib.sha256(repr(config).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path((params, *more)):
        leaf = jnp.asarray(leaf)
        sums = [int(value) for value in jax.device_get(_checksum(leaf))]
        line = f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape} {sums}\n"
        digest.update(line.encode())
    return digest.hexdigest()[:32]


@jax.jit
def _checksum(leaf: Array) -> UInt32[Array, "2"]:
    """Sums modulo 2**32 of the elements' bits, plain and weighted by place: order counts."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32).reshape(-1)
    # Odd weights, in no simple relation to each other: no bit of an element is lost.
    place = jnp.arange(bits.size, dtype=jnp.uint32) * jnp.uint32(2654435761) | jnp.uint32(1)
    return jnp.stack([jnp.sum(bits), jnp.sum(bits * place)])
