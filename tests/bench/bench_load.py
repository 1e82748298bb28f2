"""What loading a model costs in memory and time: one process a rank, each with its share.

    python -m tests.bench.bench_load --layers 16 --hidden 1536 --tp 1 2

A random Llama, its checkpoint in bfloat16 in files of 512 MB. `share` is a rank's part of the
checkpoint's bytes. Of each rank's process, `peak` is the most private memory (RssAnon) that it had
while it loaded and `after` what it had then, both without what such a process has for a model of
next to nothing. Mapped files are not in it: they are the page cache, which all ranks share.
"""

import argparse
import contextlib
import re
import tempfile
import threading
import time
from pathlib import Path

import torch

from disagg.config import CacheConfig
from disagg.engine.kv_cache import KVCache, LayerCounter
from disagg.engine.ranks import Ranks
from disagg.model.shape import read_config
from tests.tiny_models import make_tiny_llama

MIB = 1 << 20


class WatchedRanks(Ranks):
    """Samples the private memory of its processes from their start on."""

    def __init__(self, *arguments):
        self.peaks = {}
        self.loaded = threading.Event()
        self.watching = threading.Thread(target=self._sample)
        super().__init__(*arguments)
        self.loaded.set()
        self.watching.join()
        self.after = [private_bytes(process.pid) for process in self._processes]

    def _start(self, cache, meeting):
        super()._start(cache, meeting)
        if not self.watching.is_alive():
            self.watching.start()

    def _sample(self):
        while not self.loaded.wait(0.005):
            for process in list(self._processes):
                seen = private_bytes(process.pid)
                self.peaks[process.pid] = max(seen, self.peaks.get(process.pid, 0))


def private_bytes(pid):
    """Of a process that may just have started."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return 1024 * int(found[1]) if found else 0


def load(folder, tp, dtype):
    """The largest peak of a rank, the largest that is left, and seconds."""
    shape, cache = read_config(folder), CacheConfig(num_pages=1, dtype=dtype)
    with contextlib.ExitStack() as stack:
        caches = [stack.enter_context(KVCache(cache, [shape], tp)) for _ in range(tp)]
        counter = stack.enter_context(LayerCounter())
        start = time.perf_counter()
        ranks = stack.enter_context(contextlib.closing(WatchedRanks(caches, counter)))
        seconds = time.perf_counter() - start
        return max(ranks.peaks.values()), max(ranks.after), seconds


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    given = parser.parse_args(arguments)
    shape = {
        "hidden_size": given.hidden,
        "intermediate_size": 3 * given.hidden,
        "num_attention_heads": given.hidden // 64 or 1,
        "num_key_value_heads": 4 if given.hidden % 256 == 0 else given.hidden // 64 or 1,
        "head_dim": 64,
        "vocab_size": 4096,
    }
    with tempfile.TemporaryDirectory() as place:
        none = make_tiny_llama(Path(place, "none"), num_key_value_heads=4)
        folder = make_tiny_llama(
            Path(place, "model"),
            dtype=torch.bfloat16,
            max_shard_size="512MB",
            num_hidden_layers=given.layers,
            **shape,
        )
        nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        print(f"{nbytes / MIB:.0f} MiB stored in bfloat16, loaded in {given.dtype}; MiB of a rank")
        print(
            f"{'ranks':>6} {'share':>8} {'peak':>8} {'after':>8} {'peak/share':>11} {'seconds':>8}"
        )
        for tp in given.tp:
            _, base, _ = load(none, tp, given.dtype)
            peak, after, seconds = load(folder, tp, given.dtype)
            share = nbytes / tp
            print(
                f"{tp:>6} {share / MIB:>8.0f} {(peak - base) / MIB:>8.0f}"
                f" {(after - base) / MIB:>8.0f} {(peak - base) / share:>11.2f} {seconds:>8.1f}"
            )


if __name__ == "__main__":
    main()
