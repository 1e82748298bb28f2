"""Reading checkpoints: what is understood, what is refused and in which words, the fingerprint."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from disagg.kv_layout import PageOrder
from disagg.model import weights
from disagg.model.rank_group import RankGroup
from disagg.model.shape import read_config
from disagg.model.weights import Checkpoint, fingerprint, load_model
from tests.test_transformer import PROMPT, Stepper, scattered_pages
from tests.tiny_models import LLAMA3_ROPE, loaded, make_tiny_llama

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("plain"))


@pytest.fixture
def copy(plain: Path, tmp_path: Path) -> Path:
    """A checkpoint that the test may spoil."""
    return Path(shutil.copytree(plain, tmp_path / "copy"))


def change_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "DROP"}))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    (folder / "model.safetensors").unlink()  # the old file may still be mapped
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_config(tmp_path: Path) -> None:
    overrides = {"tie_word_embeddings": True, "attention_bias": True, "rms_norm_eps": 3e-5}
    folder = make_tiny_llama(tmp_path, rope_parameters=LLAMA3_ROPE, eos_token_id=9, **overrides)
    config = read_config(folder)
    assert (config.vocab_size, config.hidden_size) == (128, 64)
    assert (config.num_layers, config.num_qo_heads, config.num_kv_heads) == (3, 4, 2)
    assert (config.head_dim, config.intermediate_size, config.max_positions) == (16, 96, 512)
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (
        True,
        True,
        False,
    )
    assert (config.rms_norm_eps, config.eos_token_ids) == (3e-5, (9,))
    assert config.rope_parameters == LLAMA3_ROPE


def test_config_of_the_older_form_and_left_out_fields(copy: Path) -> None:
    """Hub files have `rope_theta` and `rope_scaling`, and leave defaults out."""
    scaling = {name: value for name, value in LLAMA3_ROPE.items() if name != "rope_theta"}
    drop = dict.fromkeys(("rope_parameters", "head_dim", "num_key_value_heads", "mlp_bias"), "DROP")
    change_config(copy, rope_theta=500000.0, rope_scaling=scaling, **drop)
    config = read_config(copy)
    assert config.rope_parameters == LLAMA3_ROPE | {"rope_theta": 500000.0}
    assert (config.head_dim, config.num_kv_heads, config.mlp_bias) == (16, 4, False)


def test_a_field_of_a_config_that_has_a_name_of_ours_is_not_ours(copy: Path, plain: Path) -> None:
    change_config(copy, num_layers=99, num_kv_heads=99, max_positions=9, eos_token_ids=[9])
    assert read_config(copy) == read_config(plain)


def test_a_field_of_another_family_means_nothing(copy: Path, plain: Path) -> None:
    other = {"rope_interleave": True, "routed_scaling_factor": 2.0, "n_shared_experts": 1}
    change_config(copy, **other, kv_lora_rank=4, num_experts=8, weight_block_size=[2, 2])
    assert read_config(copy) == read_config(plain)


@pytest.mark.parametrize("head_dim", [None, "DROP"])
def test_head_dim_that_is_left_out(tmp_path: Path, head_dim: object) -> None:
    """The configuration of Qwen3-MoE has no default for it."""
    folder = make_tiny_llama(tmp_path, family="qwen3_moe", head_dim=16)
    change_config(folder, head_dim=head_dim)
    assert read_config(folder).head_dim == 16
    loaded(folder, "float32")


def test_rope_turns_what_deepseek_calls_so(deepseek_copy: Path, deepseek: Path) -> None:
    change_config(deepseek_copy, head_dim=16)
    assert read_config(deepseek_copy) == read_config(deepseek)


DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}

QWEN3_CODER_480B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "intermediate_size": 8192,
    "max_position_embeddings": 262144,
    "max_window_layers": 62,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 2560,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts": 160,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "qkv_bias": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_qk_norm": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_config_of_published_deepseek(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    config = read_config(tmp_path)
    assert (config.num_kv_heads, config.num_kv_vectors, config.head_dim) == (1, 1, 576)
    assert (config.kv_lora_rank, config.q_lora_rank, config.v_head_dim) == (512, 1536, 128)
    assert config.moe_layers == tuple(range(3, 62))  # the last is a draft layer
    assert (config.num_experts, config.num_experts_per_tok, config.n_shared_experts) == (256, 8, 1)
    assert (config.n_group, config.topk_group, config.routed_scaling_factor) == (8, 4, 2.5)
    assert config.router_bias and config.norm_topk_prob and config.rope_interleave
    assert (len(config.rope_frequencies), config.rope_factor) == (32, 1.0)
    assert (config.weight_block_size, config.num_mtp_layers) == ((128, 128), 1)


def test_config_of_published_qwen3_coder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_CODER_480B))
    config = read_config(tmp_path)
    assert (config.num_kv_heads, config.num_kv_vectors, config.head_dim) == (8, 2, 128)
    assert (config.num_experts, config.num_experts_per_tok, config.n_group) == (160, 8, 1)
    assert config.moe_layers == tuple(range(62))
    assert config.qk_norm and config.norm_topk_prob and not config.router_bias
    assert (config.n_shared_experts, config.kv_lora_rank, config.weight_block_size) == (0, 0, None)


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "expected"),
    [(None, None, ()), (5, None, (5,)), ([5, 6], None, (5, 6)), (5, [6, 7], (6, 7)), (5, (), (5,))],
)
def test_end_tokens(
    copy: Path, in_config: object, in_generation_config: object, expected: tuple[int, ...]
) -> None:
    change_config(copy, eos_token_id=in_config)
    (copy / "generation_config.json").unlink()
    if in_generation_config is not None:
        named = {"eos_token_id": in_generation_config} if in_generation_config else {}
        text = json.dumps(named)
        (copy / "generation_config.json").write_text(text)
    assert read_config(copy).eos_token_ids == expected


def test_shards_hold_the_same_model_as_one_file(plain: Path, tmp_path: Path) -> None:
    sharded = make_tiny_llama(tmp_path, max_shard_size="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert not (sharded / "model.safetensors").exists()
    one, many = (
        Checkpoint(read_config(plain), torch.float32),
        Checkpoint(read_config(sharded), torch.float32),
    )
    assert one.stored.keys() == many.stored.keys()
    assert all(torch.equal(tensor, many.stored[name]) for name, tensor in one.stored.items())
    loaded(sharded, "float32")
    assert fingerprint(read_config(sharded)) == fingerprint(read_config(plain))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_are_converted_to_the_dtype_asked_for(
    tmp_path: Path, stored: torch.dtype, dtype: str
) -> None:
    folder = make_tiny_llama(tmp_path, dtype=stored)
    read = Checkpoint(read_config(folder), getattr(torch, dtype)).read(Q_PROJ, (64, 64))
    assert read.dtype == getattr(torch, dtype)
    assert torch.equal(read, load_file(folder / "model.safetensors")[Q_PROJ].to(read.dtype))
    loaded(folder, dtype)


def test_tensors_that_need_no_conversion_stay_in_the_mapped_file(plain: Path) -> None:
    checkpoint = Checkpoint(read_config(plain), torch.float32)
    address = checkpoint.read(Q_PROJ, (64, 64)).data_ptr()
    maps = Path("/proc/self/maps").read_text().splitlines()
    of_file = [line.split()[0] for line in maps if line.endswith(f"{plain}/model.safetensors")]
    ranges = [[int(end, 16) for end in line.split("-")] for line in of_file]
    assert any(low <= address < high for low, high in ranges)


def refusal(folder: Path) -> str:
    """The one line with which a folder is refused."""
    with pytest.raises(ValueError) as caught:
        loaded(folder, "float32")
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_folder_that_is_not_there(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none") == (
        f"model folder {tmp_path / 'none'} does not exist or has no config.json"
    )


def test_folder_without_config(copy: Path) -> None:
    (copy / "config.json").unlink()
    assert refusal(copy) == f"model folder {copy} does not exist or has no config.json"


def test_config_that_is_not_json(copy: Path) -> None:
    (copy / "config.json").write_text('{"architectures": [')
    assert "config.json is not valid JSON" in refusal(copy)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_json_that_is_no_object(copy: Path, name: str) -> None:
    (copy / name).write_text("[]")
    assert refusal(copy) == f"{copy / name} is not valid: expected a JSON object, got []"


def test_index_that_lists_no_file(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text("{}")
    assert "lacks the tensor model.embed_tokens.weight" in refusal(copy)


def test_folder_without_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert f"{copy / 'model.safetensors'} is missing, damaged or half copied" in refusal(copy)


def test_half_copied_weights(copy: Path) -> None:
    data = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert "model.safetensors is missing, damaged or half copied" in refusal(copy)


def test_missing_shard(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, max_shard_size="50KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"{shard} is missing, damaged or half copied" in refusal(folder)


CONFIGS_REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "unknown architecture": (
        {"architectures": ["FalconForCausalLM"]},
        "architectures ['FalconForCausalLM'] is not supported; expected ['LlamaForCausalLM'] or",
    ),
    "no architecture": ({"architectures": "DROP"}, "architectures None is not supported"),
    "another model type": ({"model_type": "granite"}, "model_type 'granite' is not supported"),
    "unknown model type": ({"model_type": "nonesuch"}, "is not a valid config"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    "quantised": (
        {"quantization_config": {"quant_method": "awq"}},
        "quant_method 'awq' is not supported; expected None or 'fp8'",
    ),
    "sliding window": (
        {"sliding_window": 128},
        "sliding_window 128 is not supported; expected None",
    ),
    "rope scaling": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "rope_type 'dynamic' is not supported; expected 'default' or",
    ),
    "rope scaling, older form": (
        {"rope_parameters": "DROP", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope_type 'dynamic' is not supported",
    ),
    "partial rope": (
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            }
        },
        "partial_rotary_factor 0.5 is not supported",
    ),
    "heads": (
        {"num_key_value_heads": 3},
        "num_attention_heads (4) must be a multiple of num_key_value_heads (3)",
    ),
    "no KV heads": ({"num_key_value_heads": 0}, "num_key_value_heads is 0; expected a number from"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers is 0; expected a number from 1 on"),
    "kind of a number": ({"num_hidden_layers": "3"}, "'num_hidden_layers' expected int, got str"),
    "null": ({"rms_norm_eps": None}, "'rms_norm_eps' expected float, got NoneType"),
    "theta": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": "1e6"}},
        "rope_theta is '1e6'; expected a number from 1 on",
    ),
    "factor": (
        {"rope_parameters": LLAMA3_ROPE | {"factor": 0}},
        "factor is 0; expected a number from 1 on",
    ),
    "kinds of layers": (
        {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
        "layer_types ['chunked_attention', 'full_attention'] is not supported",
    ),
    "draft layers that are no number": (
        {"num_nextn_predict_layers": "one"},
        "is not a valid config",
    ),
    "quantisation that is no object": ({"quantization_config": "fp8"}, "is not a valid config"),
}


@pytest.mark.parametrize(("fields", "text"), CONFIGS_REFUSED.values(), ids=CONFIGS_REFUSED.keys())
def test_what_cannot_be_computed_is_refused_by_name(
    copy: Path, fields: dict[str, object], text: str
) -> None:
    change_config(copy, **fields)
    assert text in refusal(copy)


def test_code_in_the_folder_is_not_run(copy: Path) -> None:
    (copy / "own.py").write_text(f"open({str(copy / 'ran')!r}, 'w')\nclass Config: pass")
    change_config(copy, model_type="own", auto_map={"AutoConfig": "own.Config"})
    assert "is not a valid config" in refusal(copy)
    assert not (copy / "ran").exists()


def test_missing_tensor(copy: Path) -> None:
    change_tensors(copy, lambda tensors: tensors.pop(Q_PROJ))
    assert f"lacks the tensor {Q_PROJ}" in refusal(copy)


def test_missing_head(copy: Path) -> None:
    change_tensors(copy, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lacks the tensor lm_head.weight" in refusal(copy)


def test_wrong_shape(copy: Path) -> None:
    change_tensors(copy, lambda tensors: tensors.update({Q_PROJ: torch.zeros(32, 64)}))
    assert "does not go with config.json; expected [64, 64]," in refusal(copy)
    assert "got [32, 64]" in refusal(copy)


def test_weights_that_are_not_floats(copy: Path) -> None:
    integers = torch.zeros(64, 64, dtype=torch.int8)
    change_tensors(copy, lambda tensors: tensors.update({Q_PROJ: integers}))
    expected = f"{Q_PROJ} in {copy} is torch.int8; expected one of (torch.float32, torch.bfloat16"
    assert expected in refusal(copy)


def test_tensor_that_the_model_would_leave_out(copy: Path) -> None:
    name = "model.layers.0.self_attn.q_norm.weight"
    change_tensors(copy, lambda tensors: tensors.update({name: torch.ones(16)}))
    assert f"has the tensor {name}, which this architecture does not use" in refusal(copy)


def test_tensors_that_older_checkpoints_carry_along_are_ignored(copy: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(copy, lambda tensors: tensors.update({name: torch.ones(8)}))
    change_config(copy, tie_word_embeddings=True)  # and lm_head.weight is still there
    loaded(copy, "float32")


def test_fingerprint_is_stable(plain: Path, copy: Path) -> None:
    assert fingerprint(read_config(copy)) == fingerprint(read_config(plain))
    assert len(fingerprint(read_config(plain))) == 32
    int(fingerprint(read_config(plain)), 16)


CHANGES: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "one element": lambda tensors: tensors[Q_PROJ][3].__setitem__(7, 0.125),
    "last element": lambda tensors: tensors["lm_head.weight"][-1].__setitem__(-1, 0.125),
    "dtype": lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].bfloat16()}),
    "shape": lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].reshape(32, 128)}),
    "name": lambda tensors: tensors.update({"renamed": tensors.pop(Q_PROJ)}),
    "exchange": lambda tensors: tensors.update(
        {Q_PROJ: tensors[Q_PROJ.replace("1", "2")], Q_PROJ.replace("1", "2"): tensors[Q_PROJ]}
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_fingerprint_sees_the_weights(
    plain: Path, copy: Path, change: Callable[[dict[str, Tensor]], object]
) -> None:
    change_tensors(copy, change)
    assert fingerprint(read_config(copy)) != fingerprint(read_config(plain))


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({"rms_norm_eps": 1e-3}, True),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, True),
        ({"attention_bias": True}, True),
        ({"eos_token_id": 3}, False),
        ({"max_position_embeddings": 99}, False),
    ],
)
def test_fingerprint_sees_the_config_fields_that_shape_the_kv(
    plain: Path, copy: Path, fields: dict[str, object], seen: bool
) -> None:
    change_config(copy, **fields)
    (copy / "generation_config.json").unlink()
    assert (fingerprint(read_config(copy)) != fingerprint(read_config(plain))) == seen


def test_fingerprint_samples_large_tensors_everywhere(tmp_path: Path) -> None:
    """Each sixteenth of a 1 MiB tensor counts."""
    folder = make_tiny_llama(tmp_path, vocab_size=4096, num_hidden_layers=1)
    prints = {fingerprint(read_config(folder))}
    for part in range(16):
        change_tensors(folder, lambda t, part=part: t["lm_head.weight"].chunk(16)[part].neg_())
        prints.add(fingerprint(read_config(folder)))
    assert len(prints) == 17


# --- What DeepSeek checkpoints have ---


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("deepseek"), family="deepseek_v3")


@pytest.fixture
def deepseek_copy(deepseek: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(deepseek, tmp_path / "copy"))


def quantise(folder: Path, block: tuple[int, int]) -> Path:
    """Make the linear maps float8 in blocks, as the published checkpoints are; return a folder with
    what they then mean."""
    meant = Path(shutil.copytree(folder, folder.parent / "meant"))
    meaning: dict[str, Tensor] = {}

    def change(tensors: dict[str, Tensor]) -> None:
        for name, weight in list(tensors.items()):
            if not name.endswith("_proj.weight") and "kv_a" not in name:
                continue
            if weight.ndim != 2:
                continue
            rows, columns = (-(-size // of) for size, of in zip(weight.shape, block, strict=True))
            scales = torch.rand(rows, columns) + 0.5
            spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            spread = spread[: weight.shape[0], : weight.shape[1]]
            tensors[name] = (weight / spread).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales
            meaning[name] = tensors[name].float() * spread

    change_tensors(folder, change)
    change_tensors(meant, lambda tensors: tensors.update(meaning))
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    change_config(folder, quantization_config=quantization | {"activation_scheme": "dynamic"})
    assert len(meaning) > 20
    return meant


def test_float8_weights_are_multiplied_by_the_scales_of_their_blocks(deepseek_copy: Path) -> None:
    """With blocks that end inside of heads, shares of ranks and matrices."""
    meant = quantise(deepseek_copy, (10, 14))
    here, there = (
        Checkpoint(read_config(folder), torch.float32) for folder in (deepseek_copy, meant)
    )
    for name, tensor in there.stored.items():
        share = partial(RankGroup(1, 2).cut, axis=0)
        for cut in (share, partial(RankGroup(1, 2).cut, axis=tensor.ndim - 1)):
            if tensor.shape[0] % 2 == tensor.shape[-1] % 2 == 0:
                shape = tuple(tensor.shape)
                assert here.read(name, shape, cut).equal(there.read(name, shape, cut)), name
    # Not to the bit: that depends on where in memory equal weights lie.
    torch.testing.assert_close(logits_of(deepseek_copy), logits_of(meant))


def logits_of(folder: Path) -> Tensor:
    stepper = Stepper(loaded(folder, "float32"), PageOrder.HND)
    return stepper.step([(PROMPT, 0, scattered_pages(8))])[0]


def test_float8_without_scales_is_refused(deepseek_copy: Path) -> None:
    quantise(deepseek_copy, (16, 16))
    name = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    change_tensors(deepseek_copy, lambda tensors: tensors.pop(name))
    assert f"lacks the tensor {name}" in refusal(deepseek_copy)
    change_tensors(deepseek_copy, lambda tensors: tensors.update({name: torch.ones(3, 3)}))
    assert f"{name} in {deepseek_copy} does not go with config.json; expected [4, 3]" in refusal(
        deepseek_copy
    )


def test_float8_of_unknown_blocks_is_refused(deepseek_copy: Path) -> None:
    quantise(deepseek_copy, (16, 16))
    change_config(deepseek_copy, quantization_config={"quant_method": "fp8"})
    assert "is torch.float8_e4m3fn; expected one of" in refusal(deepseek_copy)
    assert "needs a weight_block_size in config.json" in refusal(deepseek_copy)


def test_draft_layers_are_left_out_and_that_is_said_once(
    deepseek: Path, deepseek_copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change_config(deepseek_copy, num_nextn_predict_layers=1)
    loaded(deepseek_copy, "float32")
    assert not caplog.messages, "it has none"
    name = "model.layers.3.eh_proj.weight"
    change_tensors(deepseek_copy, lambda tensors: tensors.update({name: torch.ones(64, 128)}))
    config = read_config(deepseek_copy)
    for rank in (0, 1):
        load_model(config, "float32", RankGroup(rank, 2))
    [said] = caplog.messages
    assert "of its num_nextn_predict_layers (1), 0 are used" in said
    torch.testing.assert_close(logits_of(deepseek_copy), logits_of(deepseek))
    change_config(deepseek_copy, num_nextn_predict_layers=0)
    assert f"has the tensor {name}, which this architecture does not use" in refusal(deepseek_copy)


DEEPSEEK_REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "groups": (
        {"n_group": 3},
        "num_experts_per_tok (3) of 8 experts cannot be chosen from topk_group (2) of n_group (3)",
    ),
    "groups of one": ({"n_group": 8, "topk_group": 4}, "equal groups of at least 2"),
    "too few groups": ({"topk_group": 1}, "num_experts_per_tok (3) of 8 experts cannot"),
    "too many groups": ({"topk_group": 5}, "topk_group (5) of n_group (4)"),
    "too many experts": ({"n_routed_experts": 12}, "config.json; expected [12, 64], got [8, 64]"),
    "router": ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
    "choice": ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
    "quantisation": (
        {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}},
        "fmt 'e5m2' is not supported; expected None or 'e4m3'",
    ),
    "blocks": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": 128}},
        "weight_block_size 128 is not two numbers from 1 on",
    ),
    "blocks of nothing": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}},
        "weight_block_size [0, 128] is not two numbers from 1 on",
    ),
    "odd rope": ({"qk_rope_head_dim": 7, "head_dim": 7}, "head_dim (7) even"),
    "no groups": ({"n_group": 0}, "n_group is 0; expected a number from 1 on"),
    "no experts": ({"num_experts_per_tok": None}, "num_experts_per_tok is None; expected a number"),
}


@pytest.mark.parametrize(("fields", "text"), DEEPSEEK_REFUSED.values(), ids=DEEPSEEK_REFUSED.keys())
def test_what_deepseek_cannot_be_is_refused_by_name(
    deepseek_copy: Path, fields: dict[str, object], text: str
) -> None:
    change_config(deepseek_copy, **fields)
    assert text in refusal(deepseek_copy)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.mlp.experts.7.up_proj.weight",
        "model.layers.2.mlp.shared_experts.up_proj.weight",
        "model.layers.2.mlp.gate.e_score_correction_bias",
        "model.layers.0.self_attn.kv_b_proj.weight",
    ],
)
def test_missing_and_surplus_tensors_of_deepseek(deepseek_copy: Path, name: str) -> None:
    change_tensors(deepseek_copy, lambda tensors: tensors.update({f"{name}.more": torch.ones(1)}))
    assert f"has the tensor {name}.more, which" in refusal(deepseek_copy)
    change_tensors(deepseek_copy, lambda tensors: tensors.pop(name))
    assert f"lacks the tensor {name}" in refusal(deepseek_copy)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("rank", "stream", "shown"),
    [(0, Terminal, True), (1, Terminal, False), (0, io.StringIO, False)],
)
def test_progress_is_shown_once_and_to_people_alone(
    plain: Path, monkeypatch: pytest.MonkeyPatch, rank: int, stream: type, shown: bool
) -> None:
    written = stream()
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setattr(weights, "tqdm", partial(weights.tqdm, mininterval=0.0))
    monkeypatch.setattr(weights, "PROGRESS_AFTER_SECONDS", 0.0)
    load_model(read_config(plain), "float32", RankGroup(rank, 2))
    assert ("loading: " in written.getvalue()) == shown
    assert ("3/3" in written.getvalue()) == shown
