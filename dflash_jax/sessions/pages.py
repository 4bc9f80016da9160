"""Who owns which page of the paged stores: reference counts on the host.

A page id names the same `page_size` positions in every paged store of a state (target layers and
full draft layers), so one owner's list of pages is the block table of all of them.

Pages are append-only: whoever holds positions `[0, F)` of a page may rely on them for ever, since
the one row that writes to it writes from F on. So a page may be shared while it is being filled,
and a row that goes on from a shared one, which it may not write to, copies it first.
"""

import weakref
from collections.abc import Sequence


class OutOfPagesError(MemoryError):
    """Fewer pages are free than were asked for."""


class PageAllocator:
    """Pages 0..total - 1 of a pool.

    Args:
      total: pages of the pool. page_size: positions of a page.
    """

    def __init__(self, total: int, page_size: int):
        self.total, self.page_size = total, page_size
        self._references = [0] * total
        self._free = list(range(total - 1, -1, -1))  # the lowest is given out first

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - self.free

    def pages_for(self, positions: int) -> int:
        """Pages that so many positions take."""
        return -(-positions // self.page_size)

    def lease(self, fresh: int, shared: Sequence[int] = ()) -> "Lease":
        """Holds the pages `shared`, which somebody holds already, and `fresh` new ones, in order.

        Raises:
          OutOfPagesError: fewer than `fresh` are free; then nothing has changed.
        """
        if fresh > self.free:
            raise OutOfPagesError(f"{fresh} pages of {self.page_size} positions, {self.free} free")
        for page in shared:
            if not self._references[page]:
                raise ValueError(f"page {page}: shared, but nobody holds it")
        pages = (*shared, *(self._free.pop() for _ in range(fresh)))
        for page in pages:
            self._references[page] += 1
        return Lease(self, pages)

    def references(self, page: int) -> int:
        """How many leases hold a page."""
        return self._references[page]

    def _release(self, pages: tuple[int, ...]) -> None:
        for page in pages:
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)


class Lease:
    """Pages held by one owner; given back by `release`, at the latest when the lease is dropped."""

    def __init__(self, allocator: PageAllocator, pages: tuple[int, ...]):
        self.pages = pages
        self._finalizer = weakref.finalize(self, allocator._release, pages)

    def release(self) -> None:
        """Gives the pages back; once is enough."""
        self._finalizer()

    @property
    def held(self) -> bool:
        return self._finalizer.alive
