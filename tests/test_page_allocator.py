"""The allocator: no page twice, none lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.engine.page_allocator import PageAllocator


@settings(deadline=None)
@given(
    capacity=st.integers(1, 12),
    operations=st.lists(st.tuples(st.booleans(), st.integers(0, 13)), max_size=60),
)
def test_random_operations_keep_every_page_in_one_place(capacity, operations):
    allocator = PageAllocator(capacity)
    owned: list[tuple[int, ...]] = []
    for wants_more, number in operations:
        if wants_more:
            free = allocator.num_free
            pages = allocator.allocate(number)
            assert (pages is None) == (number > free)
            if pages is None:
                assert allocator.num_free == free, "a refused allocation took pages"
            else:
                assert len(pages) == number
                assert not set(pages) & {page for group in owned for page in group}
                owned.append(pages)
        elif owned:
            allocator.free(owned.pop(number % len(owned)))
        assert allocator.num_free == capacity - sum(map(len, owned))
    for pages in owned:
        allocator.free(pages)
    assert allocator.num_free == capacity
    assert sorted(allocator.allocate(capacity)) == list(range(capacity))


def test_what_is_not_free_now_is_not_given():
    allocator = PageAllocator(10)
    assert allocator.allocate(6) is not None
    assert allocator.allocate(5) is None
    assert allocator.num_free == 4


@pytest.mark.parametrize("index", [0, 3, 4, -1])
def test_freeing_what_nobody_owns_is_an_error(index):
    allocator = PageAllocator(4, kind="tail slot")
    allocator.free(allocator.allocate(4))
    with pytest.raises(AssertionError, match=f"tail slot {index} is freed"):
        allocator.free((index,))
