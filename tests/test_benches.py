"""Every bench runs from end to end, at sizes too small to say anything, and prints its table."""

import re
import subprocess
import sys

import pytest

SMALL = {
    "bench_experts": "--hidden 32 --size 16 --experts 8 --chosen 2 --tokens 1 9 --repeats 2",
    "bench_exposed": "--repeats 1",
    "bench_generate": "--dtype bfloat16 --batches 1 2 --prompt-tokens 8 --max-tokens 3"
    " --prefill-tokens 20 --repeats 1",
    "bench_load": "--layers 2 --hidden 256 --tp 1 2",
    "bench_memory": "--requests 40 --every 20 --warm-up 20 --limit 1000",
    "bench_messenger_cost": "--tokens 64 --pairs 1 --threads 1",
    "bench_peers": "--mib 1 --repeats 1",
    "bench_posting": "--pages 16 64 --repeats 2",
    "bench_sharding": "--layers 2 --pages 4 --repeats 2",
    "bench_speculate": "--speculate 1 --prompts 1 --max-tokens 5",
    "bench_shm": "--mib 1 --repeats 1",
    "bench_tcp": "--mib 1 --repeats 1",
    "bench_tp": "--batch 1 --prompt-tokens 4 --max-tokens 3 --repeats 1",
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("bench", SMALL)
def test_runs_and_prints_figures(bench: str) -> None:
    command = [sys.executable, "-m", f"tests.bench.{bench}", *SMALL[bench].split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d", done.stdout), "a table has figures"
    assert "Traceback" not in done.stderr
