"""RDMA for real: queue pairs of soft-RoCE, in emulated machines that `tests/rdma_vm/` boots.

What is printed on the machines' consoles is shown when a test fails.
"""

from __future__ import annotations

import json

import pytest

from disagg.serve.answer import as_json
from disagg.serve.node import Node
from tests.nodes import ask, node_config
from tests.rdma_vm.kernel import CannotBootError, cached_kernel, missing
from tests.rdma_vm.machines import MOST_SECONDS, run
from tests.tiny_models import add_draft_layer, greedy, make_tiny_llama, save_word_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(MOST_SECONDS + 600),  # a kernel may have to be fetched
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

PROMPT = [7 * i * i % 128 for i in range(100)]
MAX_TOKENS = 8
#: One test there may take longer than here.
PYTEST = ("python", "-m", "pytest", "--timeout=900", "--color=no", "--durations=5")


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    """Where there is neither a network nor a kernel in the cache, a skip."""
    try:
        cached_kernel()
    except CannotBootError as error:
        pytest.skip(str(error))


def test_every_transfer_test_passes_over_verbs() -> None:
    suite = "tests/test_transfer_conformance.py"
    run([*PYTEST, "-k", "verbs", suite])


def test_faults_end_as_the_contract_says() -> None:
    structs = "tests/test_verbs_device.py::test_a_real_queue_pair_is_found_behind_its_wrapper"
    run([*PYTEST, structs, "tests/rdma_vm/faults.py"])


def answer_of_two_machines(folder, *flags):
    """What `PROMPT` is answered there, compared with transformers."""
    expected = greedy(folder, PROMPT, MAX_TOKENS)
    words = " ".join(f"t{token}" for token in PROMPT)
    job = ["bash", "tests/rdma_vm/split.sh", str(folder), words, str(MAX_TOKENS), *flags]
    _, decoder = run(job, machines=2)
    answer = json.loads(next(line for line in decoder.splitlines() if line.startswith("{")))
    assert answer["token_ids"] == expected
    assert answer["transfer"]["transport"] == "verbs"
    return answer


def test_two_machines_answer_as_transformers_does(tmp_path, capsys) -> None:
    folder = save_word_tokenizer(make_tiny_llama(tmp_path / "model"))
    answer = answer_of_two_machines(folder)
    with capsys.disabled():
        transport = answer["transfer"]["transport"]
        print(f"\n{answer['token_ids']} from two machines, of 2 ranks and of 1, over {transport}")
    assert answer["transfer"]["writes"] == 3 * 7 * 2 + 1


def test_two_machines_keep_the_guesses_of_one(tmp_path) -> None:
    """Of a draft layer. One rank holds all of a latent, so it is written once for each page."""
    folder = add_draft_layer(make_tiny_llama(tmp_path / "model", family="deepseek_v3"))
    answer = answer_of_two_machines(save_word_tokenizer(folder), "--speculate=2")
    assert answer["transfer"]["writes"] == (3 + 1) * 7 + 1
    with Node(node_config(folder, speculate=2, page_size=16)) as node:
        assert answer["speculation"] == as_json(0, ask(node, PROMPT, MAX_TOKENS))["speculation"]
