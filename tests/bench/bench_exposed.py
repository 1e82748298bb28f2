"""How much of a slow transfer is left after the forward pass: layer by layer, and all at its end.

    python -m tests.bench.bench_exposed --share 0.7 --repeats 5

A prefiller in a process of its own runs a random model in one chunk. Its layers are given equal
time (half as long again as the slowest took), so that the machine's moods do not count; its shm
copies take as long as over a link on which the whole KV needs `--share` of the prefill.
"after the forward" is the same code with a layer counter that is seen at the end of a step only.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

from disagg.transfer.shm import copy_pages
from disagg.transfer.transfer_engine import TransferEngine
from tests.engines import shm_medium
from tests.nodes import HeldNode, ask, node_config
from tests.tiny_models import make_tiny_llama

NUM_LAYERS = 16
NUM_TOKENS = 1025
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.05,
}
NODE = {"page_size": 16, "num_pages": 256, "max_batch_tokens": 2048}


class ThrottledCopy:
    """Copies as if over a link of `bandwidth` bytes a second."""

    bandwidth = float("inf")

    def __call__(self, source, target, page_bytes, offsets):
        end = time.monotonic() + page_bytes * len(offsets[0]) / self.bandwidth
        copy_pages(source, target, page_bytes, offsets)
        time.sleep(max(0.0, end - time.monotonic()))


class PacedNode(HeldNode):
    """Layers take `layer_seconds`, and are seen at the end of a step only if not `by_layer`."""

    def __init__(self, config):
        self.layer_seconds, self.by_layer, self.started = 0.0, True, []
        self.copy = ThrottledCopy()
        super().__init__(
            config,
            before_layer=self.pace,
            make_transfer=lambda: TransferEngine([shm_medium(self.copy)]),
        )

    def pace(self, layer):
        """Called when a layer starts, and once more when the last one was counted."""
        if layer == 0:
            self.started = []
        elif layer < NUM_LAYERS:
            time.sleep(max(0.0, self.started[-1] + self.layer_seconds - time.monotonic()))
        self.started.append(time.monotonic())

    def _build_messenger(self):
        messenger = super()._build_messenger()
        step, read = NUM_LAYERS + 1, self._counter.read
        messenger.read_counter = lambda: read() if self.by_layer else read() // step * step
        return messenger


def prefiller_main(pipe, folder):
    with PacedNode(node_config(folder, listen=("127.0.0.1", 0), **NODE)) as node:
        pipe.send(node.address)
        while (order := pipe.recv()) is not None:
            node.layer_seconds, node.copy.bandwidth, node.by_layer = order
            pipe.send(None)
            pipe.recv()
            pipe.send([b - a for a, b in zip(node.started, node.started[1:], strict=False)])


def run(decoder, pipe, seed, *, layer_seconds=0.0, bandwidth=float("inf"), by_layer=True):
    """One prompt: what its transfer was like, and the seconds of each layer."""
    pipe.send((layer_seconds, bandwidth, by_layer))
    pipe.recv()
    prompt = [(seed + 7 * i) % 128 for i in range(NUM_TOKENS)]
    completion = ask(decoder, prompt, 1).result(60)
    pipe.send("done")
    assert completion.transfer is not None, completion.error
    return completion.transfer, pipe.recv()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--share", type=float, default=0.7, help="transfer time / prefill time")
    parser.add_argument("--repeats", type=int, default=5, help="the median of so many is shown")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = make_tiny_llama(Path(name), **SHAPE)
        pipe, theirs = context.Pipe()
        child = context.Process(target=prefiller_main, args=(theirs, folder), daemon=True)
        child.start()
        with HeldNode(node_config(folder, prefillers=(pipe.recv(),), **NODE)) as decoder:
            slowest = statistics.median(max(run(decoder, pipe, seed)[1]) for seed in range(5))
            layer_seconds = 1.5 * slowest
            prefill = NUM_LAYERS * layer_seconds
            nbytes = run(decoder, pipe, 5)[0].bytes
            bandwidth = nbytes / (options.share * prefill)
            one_layer = options.share * layer_seconds
            print(
                f"{NUM_LAYERS} layers of {1e3 * layer_seconds:.1f} ms, {nbytes / 1e6:.1f} MB at"
                f" {bandwidth / 1e6:.0f} MB/s: {1e3 * one_layer:.1f} ms a layer;"
                f" median of {options.repeats}"
            )
            print(f"{'sent':<20} {'exposed ms':>10} {'in layers':>10} {'hidden':>7}")
            for by_layer, what in ((True, "layer by layer"), (False, "after the forward")):
                found = [
                    run(
                        decoder,
                        pipe,
                        10 + seed,
                        layer_seconds=layer_seconds,
                        bandwidth=bandwidth,
                        by_layer=by_layer,
                    )[0]
                    for seed in range(options.repeats)
                ]
                exposed = statistics.median(stats.exposed for stats in found)
                hidden = statistics.median(1 - stats.exposed / stats.span for stats in found)
                print(
                    f"{what:<20} {1e3 * exposed:>10.1f} {exposed / one_layer:>10.2f} {hidden:>7.0%}"
                )
        pipe.send(None)
        child.join()


if __name__ == "__main__":
    main()
