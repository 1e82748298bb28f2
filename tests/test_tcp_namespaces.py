"""Two hosts, as far as one kernel can be two: a network namespace for each script, a cable between.

prefiller: 10.213.0.1 [veth] ============== [veth] 10.213.0.2: decoder
                        slow: tc tbf
                        cut: ip link set down
"""

import contextlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.nodes import Oracle, wait_until
from tests.scripts import scripts
from tests.tiny_models import make_tiny_llama, save_word_tokenizer

pytestmark = pytest.mark.slow

MODE = ("--dtype=float32", "--page-size=4", "--peer-timeout=3")
#: 1.5 MB of KV.
LONG_PROMPT = tuple(7 * i * i % 128 for i in range(2000))
MAX_TOKENS = 5
#: Bits a second: the long prompt's KV takes three seconds.
SLOW = "4mbit"
CUT_AT_BYTES = 400_000


class Cable:
    """Two namespaces and the cable between them."""

    def __init__(self):
        self.names = [f"disagg-{side}-{os.getpid()}" for side in ("prefill", "decode")]
        self.addresses = ["10.213.0.1", "10.213.0.2"]

    def lay(self):
        prefill, decode = self.names
        for name in self.names:
            run("ip", "netns", "add", name)
        end = ("peer", "name", "end", "netns", decode)
        run("ip", "link", "add", "end", "netns", prefill, "type", "veth", *end)
        for name, address in zip(self.names, self.addresses, strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/30", "dev", "end")
        self.set("up")

    def set(self, state):
        for name in self.names:
            run("ip", "-n", name, "link", "set", "end", state)

    @contextlib.contextmanager
    def slow(self):
        tbf = ("root", "tbf", "rate", SLOW, "burst", "16kb", "latency", "200ms")
        run("tc", "-n", self.names[0], "qdisc", "add", "dev", "end", *tbf)
        try:
            yield
        finally:
            self.set("up")
            run("tc", "-n", self.names[0], "qdisc", "del", "dev", "end", "root")

    def sent_bytes(self):
        """By the prefiller's host."""
        told = run("ip", "-n", self.names[0], "-s", "-j", "link", "show", "dev", "end")
        return json.loads(told)[0]["stats64"]["tx"]["bytes"]

    def take_away(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


@pytest.fixture(scope="module")
def cable():
    if os.geteuid() != 0:
        pytest.skip("only root can make network namespaces: run these tests as root")
    if not all(map(shutil.which, ("ip", "tc"))):
        pytest.skip("needs ip and tc: apt-get install iproute2")
    cable = Cable()
    try:
        cable.lay()
        with cable.slow():
            pass
    except OSError as error:
        cable.take_away()
        pytest.skip(f"no network namespaces or no tbf here (a container? a small kernel?): {error}")
    yield cable
    cable.take_away()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return save_word_tokenizer(make_tiny_llama(folder, max_position_embeddings=4096))


@pytest.fixture(scope="module")
def expected(model):
    return list(Oracle(model)(LONG_PROMPT, MAX_TOKENS))


class Nodes:
    """A prefiller that serves all tests, so that each shows that it survived the one before."""

    def __init__(self, starter, cable, model):
        self.starter = starter
        self.cable = cable
        self.flags = (*MODE, f"--model={model}")
        self.prefiller = self.start(0, "run_prefill.py", f"--listen={cable.addresses[0]}:0")

    def start(self, side, name, *flags):
        within = ("ip", "netns", "exec", self.cable.names[side])
        return self.starter.start(name, *self.flags, *flags, within=within)

    def decode(self, *flags):
        prompt = " ".join(f"t{token}" for token in LONG_PROMPT)
        where = f"--prefill={self.prefiller.address()}"
        more = ("--raw", "--json", f"--max-tokens={MAX_TOKENS}", where, *flags)
        return self.start(1, "run_decode.py", *more, prompt)


@pytest.fixture(scope="module")
def nodes(cable, model, tmp_path_factory):
    with scripts(tmp_path_factory.mktemp("scripts")) as starter:
        yield Nodes(starter, cable, model)


def tokens_of(outcome):
    assert (outcome.code, outcome.stderr) == (0, "")
    return json.loads(outcome.stdout)["token_ids"]


def test_the_namespaces_are_two_networks(cable):
    links = [run("ip", "netns", "exec", name, "ip", "-j", "address") for name in cable.names]
    assert [address in links[0] for address in cable.addresses] == [True, False]
    assert [address in links[1] for address in cable.addresses] == [False, True]
    assert not Path("/sys/class/net/end").exists()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_two_hosts_answer_like_one(nodes, cable, expected, transport):
    before = cable.sent_bytes()
    assert tokens_of(nodes.decode(f"--transport={transport}").wait()) == expected
    assert cable.sent_bytes() - before > 2 * CUT_AT_BYTES


def test_shm_says_that_it_needs_one_host(nodes):
    outcome = nodes.decode("--transport=shm").wait()
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "not on the same host or not in the same network namespace" in outcome.stderr_line


def test_a_slow_cable_only_takes_longer(nodes, cable, expected):
    with cable.slow():
        assert tokens_of(nodes.decode("--on-failure=fail").wait()) == expected


@pytest.mark.parametrize("on_failure", ["fail", "local", "retry"])
def test_a_cable_cut_in_the_middle(nodes, cable, expected, on_failure):
    """The decoder fails the prompt or computes it by itself, and its end is not held up."""
    with cable.slow():
        before = cable.sent_bytes()
        decoder = nodes.decode(f"--on-failure={on_failure}")
        wait_until(lambda: cable.sent_bytes() - before > CUT_AT_BYTES, decoder._tell, 60.0)
        cable.set("down")
        cut = time.monotonic()
        outcome = decoder.wait(60.0)
        assert time.monotonic() - cut > 1.0, "it had ended already"
    answer = json.loads(outcome.stdout)
    if on_failure == "fail":
        assert (outcome.code, answer["token_ids"], answer["finish_reason"]) == (1, [], "error")
        assert "silent" in answer["error"] or "nothing" in answer["error"]
    else:
        assert (outcome.code, answer["token_ids"]) == (0, expected)
        assert "error" not in answer
    assert nodes.prefiller.poll() is None


def test_the_prefiller_serves_after_all_that(nodes, expected):
    assert tokens_of(nodes.decode("--on-failure=fail").wait()) == expected
