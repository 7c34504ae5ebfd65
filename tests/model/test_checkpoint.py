"""`Checkpoint`: what it tells before anything is loaded, and one sentence for each thing that can be wrong with it."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model.checkpoint_files import SINGLE, linked_copy, rewrite, shard

from diptych.errors import CheckpointError
from diptych.model.catalogue import CATALOGUE, hub_id
from diptych.model.checkpoint import Checkpoint
from diptych.model.components import load_clip, load_clip_tokenizer, load_text_encoder, load_tokenizer, load_vae
from diptych.model.tiny import write_tiny
from diptych.request import ClipDefaults

WEIGHTS = f"transformer/{SINGLE}"


def test_a_base_checkpoint_says_what_it_is(tiny_base):
    checkpoint = Checkpoint.open(tiny_base)
    assert checkpoint.defaults == ClipDefaults(width=864, height=480, frames=121, fps=24.0, steps=50, guidance=5.0)
    assert not checkpoint.distilled and checkpoint.has_audio and checkpoint.local and checkpoint.revision is None
    assert checkpoint.audio_scaling_factor == 0.5302
    assert checkpoint.scheduler["_class_name"] == "FlowMatchEulerDiscreteScheduler"
    assert checkpoint.scheduler["shift"] == 5.0
    assert checkpoint.transformer.out_visual_dim == 16


def test_a_distilled_checkpoint_says_what_it_is(tiny_distilled):
    checkpoint = Checkpoint.open(str(tiny_distilled))
    assert checkpoint.defaults == ClipDefaults(steps=10, guidance=1.0, distilled=True)
    assert checkpoint.audio_scaling_factor == 0.417
    assert checkpoint.scheduler["_class_name"] == "PiflowScheduler"
    assert (checkpoint.transformer.out_visual_dim, checkpoint.transformer.out_audio_dim) == (160, 400)


def test_counts_and_bytes_are_those_of_the_files(tiny_base):
    checkpoint = Checkpoint.open(tiny_base)
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2", "audio_vae", "vocoder"):
        part = checkpoint[name]
        tensors = load_file(part.files[0])
        assert part.parameters == sum(t.numel() for t in tensors.values())
        assert part.nbytes == sum(t.numel() * t.itemsize for t in tensors.values())
        assert part.dtypes == {"float32": part.parameters}
    assert [len(checkpoint[n].tensors) for n in ("vae", "audio_vae", "vocoder")] == [248, 59, 667], "as released"


def test_the_description_is_json(tiny_base):
    found = json.loads(json.dumps(Checkpoint.open(tiny_base).describe()))
    assert found["kind"] == "base" and found["components"]["vae"]["class"] == "AutoencoderKLHunyuanVideo"
    assert found["bytes"] == sum(part["bytes"] for part in found["components"].values())


def test_the_fingerprint_tells_weights_and_configs_apart(tiny_base, tmp_path):
    plain = Checkpoint.open(tiny_base).fingerprint
    moved = linked_copy(tiny_base, tmp_path / "moved")
    assert Checkpoint.open(moved).fingerprint == plain, "not of the place"
    assert Checkpoint.open(write_tiny(tmp_path / "seed", seed=1)).fingerprint != plain
    edit(moved / "audio_vae" / "config.json", scaling_factor=0.417)
    assert Checkpoint.open(moved).fingerprint != plain


def test_without_sound_it_has_none(tiny_base, tmp_path):
    folder = linked_copy(tiny_base, tmp_path / "silent")
    edit(folder / "model_index.json", audio_vae=[None, None], vocoder=[None, None])
    shutil.rmtree(folder / "audio_vae")
    checkpoint = Checkpoint.open(folder)
    assert not checkpoint.has_audio and not checkpoint.defaults.has_audio
    assert checkpoint.audio_scaling_factor is None
    with pytest.raises(CheckpointError, match="has no vocoder"):
        checkpoint["vocoder"]


def test_a_config_without_a_class_name_is_accepted(tiny_base, tmp_path):
    folder = linked_copy(tiny_base, tmp_path / "nameless")
    for part in ("transformer", "vae", "audio_vae"):
        edit(folder / part / "config.json", _class_name=None)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint["vae"].class_name == "AutoencoderKLHunyuanVideo"
    load_vae(checkpoint, "cpu", torch.float32)


@pytest.mark.parametrize(
    ("name", "repo"),
    [
        ("pro", "kandinskylab/Kandinsky-6.0-Pro-5s-Diffusers"),
        ("pro-distill", "kandinskylab/Kandinsky-6.0-Pro-distill-5s-Diffusers"),
        ("pro-pretrain", "kandinskylab/Kandinsky-6.0-Pro-pretrain-5s-Diffusers"),
        ("lite", "kandinskylab/Kandinsky-6.0-Lite-5s-Diffusers"),
        ("lite-distill", "kandinskylab/Kandinsky-6.0-Lite-distill-5s-Diffusers"),
        ("Lite-Pretrain", "kandinskylab/Kandinsky-6.0-Lite-pretrain-5s-Diffusers"),
        ("someone/of-their-own.v2", "someone/of-their-own.v2"),
    ],
)
def test_names(name, repo):
    assert hub_id(name) == repo
    assert len(CATALOGUE) == 6


# -- what can be wrong ---------------------------------------------------------------------------------------------


def edit(file: Path, **values) -> None:
    """Replace keys of a JSON file; `None` removes one."""
    config = json.loads(file.read_text()) | values
    file.unlink()
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def cut(file: Path, keep: int) -> None:
    data = file.read_bytes()[:keep]
    file.unlink()
    file.write_bytes(data)


def replace(file: Path, data: bytes) -> None:
    file.unlink()
    file.write_bytes(data)


def drop(folder: Path, key: str) -> None:
    rewrite(folder / WEIGHTS, lambda tensors: {k: v for k, v in tensors.items() if k != key})


def add(folder: Path, key: str, tensor: torch.Tensor) -> None:
    rewrite(folder / WEIGHTS, lambda tensors: tensors | {key: tensor})


def lose_a_shard(folder: Path) -> None:
    shard(folder, "transformer", "diffusion_pytorch_model")
    next((folder / "transformer").glob("*-00002-of-*")).unlink()


def cut_a_shard(folder: Path) -> None:
    shard(folder, "text_encoder", "model")
    cut(folder / "text_encoder" / "model-00002-of-00003.safetensors", 50_000)


def lie_in_the_index(folder: Path) -> None:
    index = shard(folder, "transformer", "diffusion_pytorch_model")
    values = json.loads(index.read_text())
    values["weight_map"][LATE] = "diffusion_pytorch_model-00001-of-00003.safetensors"
    index.write_text(json.dumps(values))


def lose_the_index(folder: Path) -> None:
    shard(folder, "transformer", "diffusion_pytorch_model").unlink()


def store_in_two_shards(folder: Path) -> None:
    index = shard(folder, "transformer", "diffusion_pytorch_model")
    values = json.loads(index.read_text())["weight_map"]
    first, last = (index.parent / f"diffusion_pytorch_model-0000{i}-of-00003.safetensors" for i in (1, 3))
    key = next(k for k, v in values.items() if v == first.name)
    rewrite(last, lambda tensors: tensors | {key: load_file(first)[key]})


BIAS = "out_layer.out_layer.bias"
LATE = "visual_transformer_blocks.2.video_dec_block.visual_modulation.out_layer.bias"
BROKEN = {
    "empty folder": (lambda f: [shutil.rmtree(f), f.mkdir()], r"is no checkpoint: it has no model_index.json"),
    "no folder": (shutil.rmtree, r"does not exist$"),
    "a file": (lambda f: [shutil.rmtree(f), f.write_text("x")], r"is no folder$"),
    "another pipeline": (
        lambda f: edit(f / "model_index.json", _class_name="StableDiffusionPipeline"),
        r"holds a StableDiffusionPipeline; only a Kandinsky6TI2VAPipeline can be run$",
    ),
    "an index that is no JSON": (
        lambda f: replace(f / "model_index.json", b"{"),
        r"model_index.json cannot be read as JSON",
    ),
    "an index that is a list": (lambda f: replace(f / "model_index.json", b"[]"), r"hold a JSON object, not a list$"),
    "no vae": (lambda f: shutil.rmtree(f / "vae"), r"has no folder vae"),
    "no scheduler": (lambda f: shutil.rmtree(f / "scheduler"), r"has no folder scheduler"),
    "no vocoder": (lambda f: shutil.rmtree(f / "vocoder"), r"has no folder vocoder"),
    "no tokenizer file": (
        lambda f: (f / "tokenizer" / "tokenizer.json").unlink(),
        r"tokenizer holds no tokenizer.json",
    ),
    "no config": (lambda f: (f / "vae" / "config.json").unlink(), r"vae/config.json is missing$"),
    "no weights": (lambda f: (f / "vae" / SINGLE).unlink(), r"vae holds no .safetensors file$"),
    "pickled weights": (
        lambda f: (f / "vae" / SINGLE).rename(f / "vae" / "pytorch_model.bin"),
        r"vae holds no .safetensors file; pytorch_model.bin is not read, only safetensors are$",
    ),
    "another class": (
        lambda f: edit(f / "vae" / "config.json", _class_name="AutoencoderKL"),
        r"vae holds a AutoencoderKL, where a AutoencoderKLHunyuanVideo belongs$",
    ),
    "another scheduler": (
        lambda f: edit(f / "scheduler" / "scheduler_config.json", _class_name="DDIMScheduler"),
        r"holds a DDIMScheduler, where a FlowMatchEulerDiscreteScheduler or PiflowScheduler belongs$",
    ),
    "a truncated file": (lambda f: cut(f / WEIGHTS, 100_000), r"is truncated: it holds 100000 of \d+ bytes$"),
    "a truncated header": (lambda f: cut(f / WEIGHTS, 5_000), r"is truncated: it holds 5000 of the \d+ bytes of its"),
    "a folder in place of a file": (
        lambda f: [(f / WEIGHTS).unlink(), (f / WEIGHTS).mkdir()],
        rf"{WEIGHTS} cannot be read: Is a directory$",
    ),
    "an empty file": (lambda f: cut(f / WEIGHTS, 0), r"is not a safetensors file, or cut off after 0 bytes$"),
    "no safetensors": (lambda f: replace(f / WEIGHTS, b"PK\3\4" * 99), r"is not a safetensors file, or cut off"),
    "a damaged header": (lambda f: replace(f / WEIGHTS, b"\4\0\0\0\0\0\0\0{{{{"), r"its header is not a JSON object$"),
    "an entry that lies": (
        lambda f: replace(
            f / WEIGHTS, b"\x3d\0\0\0\0\0\0\0" + b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,4]}}'.ljust(61)
        ),
        r"the entry of tensor a is damaged or of an unknown dtype$",
    ),
    "a Git LFS pointer": (
        lambda f: replace(f / WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n"),
        r"is a Git LFS pointer: the weights themselves were not fetched$",
    ),
    "a lost shard": (lose_a_shard, r"-00002-of-00003.safetensors is missing, and .*index.json names it$"),
    "a truncated shard": (cut_a_shard, r"model-00002-of-00003.safetensors is truncated: it holds 50000 of"),
    "an index that lies": (lie_in_the_index, rf"-00001-of-00003.safetensors does not hold tensor {LATE}"),
    "shards without index": (lose_the_index, r"transformer holds 3 .safetensors files and no index"),
    "a tensor in two shards": (store_in_two_shards, r"-00003-of-.* holds tensor \S+, and so does .*-00001-of-"),
    "a missing tensor": (lambda f: drop(f, BIAS), rf"transformer: tensor {BIAS} is missing from {SINGLE}$"),
    "an unknown tensor": (
        lambda f: add(f, "out_layer.lora_A.weight", torch.ones(2)),
        rf"{WEIGHTS}: unknown tensor out_layer.lora_A.weight$",
    ),
    "a mis-shaped tensor": (
        lambda f: add(f, BIAS, torch.ones(65)),
        rf"{WEIGHTS}: tensor {BIAS} has shape \(65,\), its config makes it \(64,\)$",
    ),
    "a tensor under two names": (
        lambda f: add(f, "video_time_embeddings.in_layer.bias", torch.ones(32)),
        r"tensor \S+ is also stored as video_time_embeddings\.",
    ),
    "an unknown config key": (
        lambda f: edit(f / "transformer" / "config.json", experts=8),
        r"transformer/config.json: unknown key experts$",
    ),
    "a missing config key": (
        lambda f: edit(f / "transformer" / "config.json", in_audio_dim=None),
        r"transformer/config.json: .*in_audio_dim",
    ),
    "a distilled scheduler on base heads": (
        lambda f: edit(f / "scheduler" / "scheduler_config.json", _class_name="PiflowScheduler"),
        r"transformer out_visual_dim = 16 does not fit: in_visual_dim times scheduler n_grid makes it 160$",
    ),
    "another text width": (
        lambda f: edit(f / "text_encoder_2" / "config.json", hidden_size=32),
        r"transformer in_text_dim2 = 24 does not fit: text_encoder_2 makes it 32$",
    ),
    "another sample rate": (
        lambda f: edit(f / "audio_vae" / "config.json", sample_rate=16_000),
        r"audio_vae sample_rate = 16000 does not fit: what Kandinsky 6 has makes it 44100$",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_checkpoints_are_refused_in_one_sentence(tiny_base, tmp_path, what):
    folder = linked_copy(tiny_base, tmp_path / "broken")
    damage, sentence = BROKEN[what]
    damage(folder)
    with pytest.raises(CheckpointError) as refused:
        Checkpoint.open(folder)
    assert re.search(sentence, str(refused.value)), str(refused.value)
    assert str(folder) in str(refused.value) and "\n" not in str(refused.value)


LOADED = {
    "unknown tensor": (lambda t: t | {"decoder.lora.weight": torch.ones(1)}, r"unknown tensor decoder.lora.weight$"),
    "missing tensor": (lambda t: {k: v for k, v in t.items() if k != "quant_conv.bias"}, r"quant_conv.bias is missing"),
    "mis-shaped tensor": (lambda t: t | {"quant_conv.bias": torch.ones(3)}, r"has shape \(3,\), its config makes it"),
}


@pytest.mark.parametrize("what", LOADED)
def test_other_components_are_checked_before_a_byte_is_read(tiny_base, tmp_path, what):
    folder = linked_copy(tiny_base, tmp_path / "broken")
    change, sentence = LOADED[what]
    rewrite(folder / "vae" / SINGLE, change)
    with pytest.raises(CheckpointError, match=sentence):
        load_vae(Checkpoint.open(folder), "cpu", torch.float32, lambda *_: pytest.fail("read something"))


def test_a_file_that_shrinks_after_it_was_opened_is_noticed(tiny_base, tmp_path):
    folder = linked_copy(tiny_base, tmp_path / "shrinking")
    checkpoint = Checkpoint.open(folder)
    cut(folder / "text_encoder" / "model.safetensors", 200_000)
    with pytest.raises(CheckpointError, match=r"model.safetensors ends inside tensor "):
        load_text_encoder(checkpoint, "cpu", torch.float32)
    (folder / "text_encoder_2" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read: No such file"):
        load_clip(checkpoint, "cpu", torch.float32)


def test_names_that_are_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"^lite-destil is no folder here .*; did you mean lite-distill\?$"):
        Checkpoint.open("lite-destil")
    with pytest.raises(CheckpointError, match=r"known names are demo, pro, pro-distill, .*lite-pretrain$"):
        Checkpoint.open("/no/such/folder")
    with pytest.raises(CheckpointError, match=r"does not exist$"):
        Checkpoint.open(Path("/no/such/folder"))


def test_a_revision_is_for_the_hub(tiny_base):
    with pytest.raises(CheckpointError, match=r"revision = main is for the hub; .* is a local folder$"):
        Checkpoint.open(tiny_base, revision="main")


def test_safetensors_own_reader_agrees_on_what_is_sound(tiny_base, tmp_path):
    """Files that pass here are files that the format's own library reads, tensor for tensor."""
    tensors = {"empty": torch.ones(0, 3), "scalar": torch.tensor(2.5), "b": torch.arange(3), "h": torch.ones(2).half()}
    save_file(tensors, tmp_path / "model.safetensors")
    from diptych.model.headers import read_header
    from diptych.model.loading import stream

    header = read_header(tmp_path / "model.safetensors")
    read = dict(stream(header.items(), device="cpu", dtypes=lambda _, stored: stored))
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name


def test_a_folder_may_say_its_own_defaults(tiny_base, tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    for entry in tiny_base.iterdir():
        (folder / entry.name).symlink_to(entry)
    (folder / "diptych.json").write_text(
        '{"width": 96, "height": 64, "frames": 49, "steps": 20, "example": "a red circle"}'
    )
    defaults = Checkpoint.open(folder).defaults
    assert (defaults.width, defaults.height, defaults.frames, defaults.steps) == (96, 64, 49, 20)
    assert (defaults.fps, defaults.guidance, defaults.example) == (24.0, 5.0, "a red circle")
    refused = {
        '{"wide": 96}': "unknown key wide",
        '{"width": 95}': "width = 95 is not accepted",
        '{"example": 1}': "prompt",
    }
    for text, sentence in refused.items():
        (folder / "diptych.json").write_text(text)
        with pytest.raises(CheckpointError, match=sentence):
            Checkpoint.open(folder).defaults


CONFIGS = ("model_index.json", "transformer/config.json", "audio_vae/config.json", "text_encoder/config.json")


@pytest.mark.parametrize("file", [*CONFIGS, "scheduler/scheduler_config.json"])
def test_no_value_of_a_config_is_more_than_one_sentence(tiny_distilled, tmp_path, file):
    """Each key with values of each kind: opened, or refused, and nothing else."""
    altered = linked_copy(tiny_distilled, tmp_path / "altered") / file
    config = json.loads(altered.read_bytes())
    altered.unlink()
    refused = 0
    for key in config:
        for value in (None, "x", True, -1, 0, 2.5, 10**400, [], ["x"], {}):
            altered.write_text(json.dumps(config | {key: value}))
            try:
                Checkpoint.open(tmp_path / "altered").describe()
            except CheckpointError:
                refused += 1
    assert refused > 5
    altered.write_text('{"a":' * 100_000)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        Checkpoint.open(tmp_path / "altered")


@pytest.mark.parametrize(
    ("file", "text", "load"),
    [
        ("tokenizer/tokenizer.json", "[]", load_tokenizer),
        ("tokenizer_2/tokenizer.json", '{"model": 5}', load_clip_tokenizer),
        ("vae/config.json", '{"block_out_channels": 5}', partial(load_vae, device="cpu", dtype=torch.float32)),
        ("text_encoder_2/config.json", '{"vocab_size": "x"}', partial(load_clip, device="cpu", dtype=torch.float32)),
    ],
)
def test_files_that_the_stock_classes_choke_on_are_one_sentence(tiny_distilled, tmp_path, file, text, load):
    altered = linked_copy(tiny_distilled, tmp_path / "altered")
    config = json.loads((altered / file).read_bytes())
    (altered / file).unlink()
    changed = config | json.loads(text) if text.startswith("{") else json.loads(text)
    (altered / file).write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match=file.partition("/")[0]):
        load(Checkpoint.open(altered))


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-this-name/lite"])
def test_names_that_no_folder_can_have(name):
    with pytest.raises(CheckpointError, match="cannot be opened"):
        Checkpoint.open(name)
