"""The arrays of one sequence at a frontier, on the device and on the host.

On the device an image shares whole pages with the rows and images it came from; on the host it is
a dictionary of arrays by name. Both hold exactly `[0, F)`, with the features of every position in
the draft context, so pending features are no part of them.
"""

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np

from dflash_jax.io.store import Parts
from dflash_jax.sessions.pages import Lease
from dflash_jax.sessions.rows import Dense
from dflash_jax.state.gdn import GDNState
from dflash_jax.state.paged import PagedKV, Pages
from dflash_jax.state.ring import RingKV

# Names of the paged stores, in the order of `rows.pools`.
STORES = ("target_kv", "draft_kv")


class Owner(Protocol):
    """The batch that an image is of.

    blank: what a row holds before any token. pools: the paged stores, the target's first.
    """

    blank: Dense
    pools: tuple[PagedKV, ...]

    def read_pages(self, pages: Sequence[int]) -> list[Pages]:
        """Contents of pages in every paged store, on the host."""


@dataclasses.dataclass(frozen=True)
class PartSpec:
    """What a part must look like: shape, dtype and the positions that it covers."""

    shape: tuple[int, ...]
    dtype: str
    positions: tuple[int, int]


class DeviceImage:
    """Pages held and arrays copied; the pages go back when the image is dropped.

    Args:
      lease: the pages of positions `[0, F)`.
    """

    def __init__(self, batch: Owner, lease: Lease, dense: Dense):
        self._batch = weakref.ref(batch)
        self.lease, self.dense = lease, dense

    def of(self, batch: Owner) -> bool:
        """Whether its pages are this batch's."""
        return self._batch() is batch

    def parts(self, frontier: int) -> Parts:
        """Copies it to the host."""
        batch = self._batch()
        if batch is None:
            raise ValueError("the engine of a checkpoint on the device is gone, and it with it")
        parts = jax.device_get(_named(self.dense))
        for name, pages in zip(STORES, batch.read_pages(self.lease.pages), strict=False):
            for field, array in pages._asdict().items():
                layers, count, size, *rest = array.shape
                flat = array.reshape(layers, count * size, *rest)
                parts[f"{name}.{field}"] = np.ascontiguousarray(flat[:, :frontier])
        return {name: np.asarray(array) for name, array in parts.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of its own arrays; those of its pages are the allocator's to count."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.dense))


def _named(dense: Dense) -> dict[str, jax.Array]:
    """The reverse of `dense_from`."""
    named = {"hidden": dense.hidden}
    named |= {f"gdn.{name}": array for name, array in dense.gdn._asdict().items()}
    if dense.ring is not None:
        named |= {f"ring.{name}": array for name, array in dense.ring._asdict().items()}
    return named


def dense_from(parts: Parts) -> Dense:
    """The arrays of an image that lie in no page."""
    ring = None
    if "ring.key" in parts:
        ring = RingKV(parts["ring.key"], parts["ring.value"])
    gdn = GDNState(parts["gdn.recurrent"], parts["gdn.conv"])
    return Dense(parts["hidden"], gdn, ring)


def expected_parts(batch: Owner, frontier: int) -> dict[str, PartSpec]:
    """The parts that a sequence of this batch has at a frontier."""
    ring, specs = batch.blank.ring, {}
    for name, array in _named(batch.blank).items():
        first = max(0, frontier - ring.slots) if name.startswith("ring.") else frontier
        specs[name] = _spec(array.shape, array.dtype, (first, frontier))
    for store, pool in zip(STORES, batch.pools, strict=False):
        layers, _, _, *rest = pool.key.shape
        for name in ("key", "value"):
            dtype = getattr(pool, name).dtype
            specs[f"{store}.{name}"] = _spec((layers, frontier, *rest), dtype, (0, frontier))
    return specs


def _spec(shape, dtype, positions) -> PartSpec:
    return PartSpec(tuple(shape), np.dtype(dtype).name, positions)
