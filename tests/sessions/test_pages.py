"""The allocator against a model of it: who holds what, and nothing lost nor given twice."""

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.sessions.pages import OutOfPagesError, PageAllocator


def test_pages_are_counted_by_owner():
    allocator = PageAllocator(4, 8)
    first = allocator.lease(3)
    assert first.pages == (0, 1, 2) and (allocator.free, allocator.used) == (1, 3)
    child = allocator.lease(1, first.pages[:2])
    assert child.pages == (0, 1, 3) and allocator.free == 0
    assert [allocator.references(page) for page in range(4)] == [2, 2, 1, 1]
    first.release()
    first.release()  # once is enough
    assert not first.held and child.held
    assert allocator.free == 1 and [allocator.references(p) for p in range(4)] == [1, 1, 0, 1]
    del child
    gc.collect()
    assert allocator.free == 4


def test_what_is_not_there_is_refused_and_changes_nothing():
    allocator = PageAllocator(2, 8)
    held = allocator.lease(1)
    with pytest.raises(OutOfPagesError, match="2 pages of 8 positions, 1 free"):
        allocator.lease(2, held.pages)
    with pytest.raises(ValueError, match="page 1: shared, but nobody holds it"):
        allocator.lease(0, (1,))
    assert allocator.free == 1 and allocator.references(0) == 1


@pytest.mark.parametrize(("positions", "pages"), [(0, 0), (1, 1), (8, 1), (9, 2), (16, 2)])
def test_positions_fill_whole_pages(positions, pages):
    assert PageAllocator(9, 8).pages_for(positions) == pages


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans()), max_size=40))
def test_no_page_is_lost_nor_given_twice(steps):
    """Each step takes fresh pages and shares those of another lease, or gives one back."""
    allocator, held = PageAllocator(12, 4), []
    for which, fresh, give_back in steps:
        if give_back and held:
            held.pop(which % len(held)).release()
        else:
            shared = held[which % len(held)].pages[:2] if held else ()
            in_use = {page for lease in held for page in lease.pages}
            try:
                lease = allocator.lease(fresh, shared)
            except OutOfPagesError:
                assert fresh > allocator.free
                continue
            assert not in_use & set(lease.pages[len(shared) :])
            held.append(lease)
        counts = [sum(page in lease.pages for lease in held) for page in range(12)]
        assert counts == [allocator.references(page) for page in range(12)]
        assert allocator.free == counts.count(0)
