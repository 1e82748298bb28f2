"""Is memory flat? Resident bytes of both nodes of a split pair while they serve many requests.

    OMP_NUM_THREADS=1 python -m tests.bench.bench_memory --requests 1000

Prefiller and decoder are two processes with a tiny model; prompts and answers have mixed lengths,
some are cancelled. The first requests are warm-up: pools are touched for the first time, and oneDNN
compiles a kernel for each of the few numbers of rows that a step can have. After that neither may
grow by more than `--limit` percent, or the exit code is 1.
"""

import argparse
import os
import random
import sys
import tempfile
from collections import deque
from pathlib import Path

from tests.nodes import DEADLINE_SECONDS, HeldNode, ask, node_config, prompt_of
from tests.prefiller_process import prefiller_process
from tests.tiny_models import make_tiny_llama

#: Requests in work at once.
WINDOW = 8
#: The nodes' pools: small, so that warm-up touches all of it.
NUM_PAGES = 512


def resident_bytes(pid):
    """Memory of a process that lies in RAM."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def serve(node, count, rng):
    """`count` requests of mixed sizes, `WINDOW` at a time; every tenth is cancelled."""
    open_handles = deque()
    for number in range(count):
        prompt = prompt_of(rng.randint(2, 200), seed=rng.randrange(1 << 20))
        open_handles.append(ask(node, prompt, rng.randint(1, 16)))
        if number % 10 == 9:
            open_handles[-1].cancel()
        if len(open_handles) == WINDOW:
            open_handles.popleft().result(DEADLINE_SECONDS)
    for handle in open_handles:
        handle.result(DEADLINE_SECONDS)


def measure(num_requests, every, num_warm_up):
    """Resident bytes of (decoder, prefiller): after warm-up, then after each `every` requests."""
    rng = random.Random(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        prefiller_process(make_tiny_llama(Path(folder)), num_pages=NUM_PAGES) as prefiller,
    ):
        settings = {"prefillers": (prefiller.address,), "num_pages": NUM_PAGES}
        with HeldNode(node_config(Path(folder), **settings)) as decoder:
            serve(decoder, num_warm_up, rng)
            samples = [(resident_bytes(os.getpid()), resident_bytes(prefiller.pid))]
            for _ in range(num_requests // every):
                serve(decoder, every, rng)
                samples.append((resident_bytes(os.getpid()), resident_bytes(prefiller.pid)))
    return samples


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100, help="requests between two samples")
    parser.add_argument("--warm-up", type=int, default=500, help="requests before the first one")
    parser.add_argument("--limit", type=float, default=5.0, help="growth allowed, in percent")
    options = parser.parse_args(arguments)
    samples = measure(options.requests, options.every, options.warm_up)
    print(f"{'requests':>8} {'decoder MB':>11} {'prefiller MB':>13}")
    for index, (decoder, prefiller) in enumerate(samples):
        print(f"{index * options.every:>8} {decoder / 1e6:>11.1f} {prefiller / 1e6:>13.1f}")
    growth = [100 * (max(found) / found[0] - 1) for found in zip(*samples, strict=True)]
    print("growth   {:>10.1f} % {:>11.1f} %".format(*growth))
    return 1 if max(growth) > options.limit else 0


if __name__ == "__main__":
    sys.exit(main())
