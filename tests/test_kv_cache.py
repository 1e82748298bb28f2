"""The node's memory: the tensors lie where the layouts say, and others can map it."""

import numpy as np
import pytest
import torch

from disagg.config import CacheConfig
from disagg.engine.kv_cache import KVCache, LayerCounter
from disagg.kv_layout import PageOrder, tail_slot
from disagg.shared_memory import SharedMemory
from tests.fake_model import fake_config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("order", list(PageOrder))
def test_a_page_lies_where_the_layout_says(order, dtype):
    config = CacheConfig(num_pages=5, page_size=4, kv_layout=order, dtype=dtype, num_tail_slots=2)
    with KVCache(config, [fake_config(num_layers=3)]) as cache:
        assert len(cache.layers) == 3
        assert all(layer.shape == (5, *cache.layouts[0].page_shape) for layer in cache.layers)
        assert cache.memory.nbytes == cache.layouts[0].region_bytes
        assert not cache.memory.bytes.any()
        for layer, page in [(0, 0), (1, 4), (2, 3)]:
            cache.layers[layer][page] = 1.5
            (offset,) = cache.layouts[0].page_offsets(layer, np.array([page]))
            stop = int(offset) + cache.layouts[0].page_bytes
            assert cache.memory.bytes[offset:stop].any()
            cache.memory.bytes[offset:stop] = 0
            assert not cache.memory.bytes.any(), "bytes outside the page were written"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tail_hidden_state_lies_behind_the_words(dtype):
    config = CacheConfig(num_pages=1, page_size=4, dtype=dtype, num_tail_slots=3)
    with KVCache(config, [fake_config(hidden_size=10)]) as cache:
        hidden = torch.arange(10).to(getattr(torch, dtype)) + 1
        cache.tail_hidden[1].copy_(hidden)
        start = cache.tails.itemsize + 24
        nbytes = 10 * hidden.itemsize
        written = cache.tail_memory.bytes[start : start + nbytes]
        assert bytes(written) == bytes(hidden.view(torch.uint8).numpy())
        written[:] = 0
        assert not cache.tail_memory.bytes.any(), "bytes outside the hidden state were written"


def test_pages_and_counter_can_be_mapped_by_descriptor():
    cache = KVCache(CacheConfig(num_pages=2, dtype="float32"), [fake_config()])
    counter = LayerCounter()
    mapped = SharedMemory(cache.memory.nbytes, fd=cache.memory.fd)
    word = SharedMemory(8, fd=counter.fd)
    cache.layers[1][1] = 7.0
    counter.add()
    assert mapped.bytes.view(np.float32)[-1] == 7.0
    assert word.bytes.view(np.uint64)[0] == 1
    mapped.bytes[:4] = np.frombuffer(np.float32(3.0).tobytes(), np.uint8)
    assert cache.layers[0].flatten()[0] == 3.0
    for memory in (cache, counter):
        memory.close()
        memory.close()


def test_the_counter_counts_beyond_32_bits():
    counter = LayerCounter()
    assert counter.read() == 0
    counter.bytes.view(np.uint64)[0] = 2**32 - 1
    counter.add()
    assert counter.read() == 2**32
    counter.close()


@pytest.mark.parametrize(("hidden_size", "expected"), [(10, 64), (11, 128), (26, 128), (27, 192)])
def test_a_tail_slot_is_whole_cache_lines_and_no_more(hidden_size, expected):
    assert tail_slot(hidden_size * 4).itemsize == expected
