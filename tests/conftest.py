"""Settings of every test process, made before torch is imported anywhere."""

import os

# The tensors here are tiny. A second OpenMP thread makes them ten times slower when the cores are
# busy, for it spins while it waits. Processes that tests start inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import weakref

import pytest

from disagg.shared_memory import SharedMemory


@pytest.fixture(autouse=True)
def memory_ends_with_its_test(monkeypatch):
    """Closes memory that a test made and left open: descriptors would add up to thousands."""
    made = weakref.WeakSet()
    make = SharedMemory.__init__

    def make_and_note(self, *arguments, **options):
        make(self, *arguments, **options)
        made.add(self)

    monkeypatch.setattr(SharedMemory, "__init__", make_and_note)
    yield
    for memory in made:
        memory.close()
