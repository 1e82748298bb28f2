"""A layer of experts beside transformers' own, in turns: same weights, same input.

    python -m tests.bench.bench_experts --hidden 512 --size 256 --experts 64 --chosen 8

transformers runs each implementation that it has for the CPU (`experts_implementation`), with the
same weights in float32; the ratio is to its fastest. Outputs are compared, too. `--stored bfloat16`
is what published checkpoints have; on a CPU that does not compute that, ours keeps it in half the
bytes.
"""

import argparse
import statistics
import time

import torch
from transformers import DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from disagg.config import ModelConfig
from disagg.model.moe import read_experts
from disagg.model.rank_group import RankGroup

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")


def ours(theirs, config, given):
    """The same layer, read through the names that a checkpoint has."""
    tensors = dict(theirs.state_dict())
    for number in range(given.experts):
        gate, up = tensors["experts.gate_up_proj"][number].chunk(2)
        parts = gate, up, tensors["experts.down_proj"][number]
        for name, part in zip(("gate_proj", "up_proj", "down_proj"), parts, strict=True):
            tensors[f"experts.{number}.{name}.weight"] = part

    def read(name, shape, cut=lambda tensor: tensor, dtype=None):
        assert tensors[name].shape == shape, name
        return cut(tensors[name]).to(dtype or getattr(torch, given.stored))

    unused = dict.fromkeys(("num_layers", "num_qo_heads", "num_kv_heads", "head_dim"), 1)
    shared = {"n_shared_experts": 1} if isinstance(theirs, DeepseekV3MoE) else {}
    groups = {"n_group": config.n_group, "topk_group": config.topk_group} if shared else {}
    shape = ModelConfig(
        **unused,
        **shared,
        **groups,
        vocab_size=1,
        hidden_size=given.hidden,
        intermediate_size=1,
        max_positions=1,
        rms_norm_eps=1e-6,
        rope_parameters={},
        rope_frequencies=(),
        num_experts=given.experts,
        num_experts_per_tok=given.chosen,
        moe_intermediate_size=given.size,
        norm_topk_prob=True,
        router_bias=bool(shared),
        routed_scaling_factor=config.routed_scaling_factor if shared else 1.0,
    )
    return read_experts(shape, read, RankGroup(), "")


def layers_of(family, given):
    """Theirs, and ours with the same weights."""
    same = {
        "hidden_size": given.hidden,
        "moe_intermediate_size": given.size,
        "num_experts_per_tok": given.chosen,
        "norm_topk_prob": True,
    }
    if family == "qwen3_moe":
        config = Qwen3MoeConfig(num_experts=given.experts, **same)
        make = Qwen3MoeSparseMoeBlock
    else:
        config = DeepseekV3Config(n_routed_experts=given.experts, n_group=4, topk_group=2, **same)
        make = DeepseekV3MoE
    theirs = make(config)
    for tensor in theirs.state_dict().values():
        torch.nn.init.normal_(tensor, std=0.05)
        tensor.copy_(tensor.to(getattr(torch, given.stored)))
    return theirs, config, ours(theirs, config, given)


def seconds_of(run, x):
    start = time.perf_counter()
    run(x)
    return time.perf_counter() - start


@torch.inference_mode()
def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for flag, default in (
        *(("--hidden", 512), ("--size", 256), ("--experts", 64), ("--chosen", 8)),
        *(("--repeats", 31), ("--threads", 2)),
    ):
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--stored", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512])
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    print(
        f"{given.experts} experts of {given.hidden} x {given.size}, {given.chosen} a token, stored"
        f" in {given.stored}, {given.threads} threads: ms, median of {given.repeats};"
        " ratio: best of theirs / ours"
    )
    print(
        f"{'':>12} {'tokens':>7} {'ours':>8}", *(f"{each:>11}" for each in IMPLEMENTATIONS), "ratio"
    )
    for family in ("qwen3_moe", "deepseek_v3"):
        theirs, config, mine = layers_of(family, given)
        for layer in (
            mine,
            theirs,
            mine,
            theirs,
        ):  # or the threads begin on one core, and stay there
            layer(torch.randn(1, 512, given.hidden)[0 if layer is mine else slice(None)])
        for num_tokens in given.tokens:
            x = torch.randn(num_tokens, given.hidden)
            taken = {name: [] for name in ("ours", *IMPLEMENTATIONS)}
            for _ in range(given.repeats):
                taken["ours"].append(seconds_of(mine, x))
                for name in IMPLEMENTATIONS:
                    # batched_mm copies each token's experts: hopeless for many.
                    if name != "batched_mm" or num_tokens <= 8:
                        config._experts_implementation = name
                        taken[name].append(seconds_of(theirs, x[None]))
            found = theirs(x[None])
            expected = (found[0] if isinstance(found, tuple) else found).view(x.shape)
            torch.testing.assert_close(mine(x), expected, rtol=1e-3, atol=1e-3)
            ms = {name: 1e3 * statistics.median(t) for name, t in taken.items() if t}
            best = min((name for name in ms if name != "ours"), key=ms.get)
            ratio = statistics.median(
                b / a for a, b in zip(taken["ours"], taken[best], strict=True)
            )
            cells = (f"{ms[n]:>11.2f}" if n in ms else f"{'':>11}" for n in IMPLEMENTATIONS)
            print(f"{family:>12} {num_tokens:>7} {ms['ours']:>8.2f}", *cells, f"{ratio:.2f}")


if __name__ == "__main__":
    main()
