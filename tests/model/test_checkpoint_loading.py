"""Streaming: every tensor arrives where it belongs, in its dtype, and one at a time."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo, Kandinsky6Transformer3DModel, MMAudioVAE, MMAudioVocoder
from safetensors.torch import load_file, save_file
from tests.model.checkpoint_files import SINGLE, as_native, as_older_bundle, linked_copy, rewrite, shard
from transformers import CLIPTextModel, Qwen2_5_VLForConditionalGeneration

from diptych.errors import CheckpointError
from diptych.model import loading
from diptych.model.checkpoint import Checkpoint
from diptych.model.components import (
    load_audio_vae,
    load_clip,
    load_clip_tokenizer,
    load_text_encoder,
    load_tokenizer,
    load_vae,
    load_vocoder,
)
from diptych.model.keys import stays_as_stored
from diptych.model.loading import load_transformer
from diptych.model.tiny import write_tiny
from diptych.model.transformer import Transformer


def transformer_of(folder: Path, dtype=torch.float32) -> Transformer:
    checkpoint = Checkpoint.open(folder)
    with torch.device("meta"):
        model = Transformer(checkpoint.transformer)
    load_transformer(model, checkpoint, device="cpu", dtype=dtype)
    return model


def same_tensors(ours, stock) -> None:
    ours, stock = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (ours, stock))
    assert ours.keys() == stock.keys()
    for name, tensor in stock.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


STOCK = {
    "vae": (load_vae, AutoencoderKLHunyuanVideo),
    "text_encoder_2": (load_clip, CLIPTextModel),
    "audio_vae": (load_audio_vae, MMAudioVAE),
    "vocoder": (load_vocoder, MMAudioVocoder),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("component", STOCK)
def test_components_hold_what_stock_classes_load(tiny_base, component, dtype):
    load, kind = STOCK[component]
    ours = load(Checkpoint.open(tiny_base), "cpu", dtype)
    same_tensors(ours, kind.from_pretrained(tiny_base / component, torch_dtype=dtype))
    assert not ours.training and not any(p.requires_grad for p in ours.parameters())


def test_the_transformer_holds_what_the_stock_class_loads(tiny_base):
    stock = Kandinsky6Transformer3DModel.from_pretrained(tiny_base / "transformer")
    ours = transformer_of(tiny_base)
    assert ours.state_dict().keys() == stock.state_dict().keys()
    assert all(torch.equal(ours.state_dict()[name], tensor) for name, tensor in stock.state_dict().items())


def test_the_text_encoder_is_the_language_model_alone_and_equals_the_stock_call(tiny_base):
    """What the pipeline reads is `hidden_states[-1]` of a padded, masked batch through the whole model."""
    stock = Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny_base / "text_encoder").eval()
    ours = load_text_encoder(Checkpoint.open(tiny_base), "cpu", torch.float32)
    ids = torch.randint(0, 900, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 25:] = 0
    with torch.no_grad():
        expected = stock(input_ids=ids, attention_mask=mask, output_hidden_states=True)["hidden_states"][-1]
        padded = ours(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        trimmed = ours(input_ids=ids[1:, :25], use_cache=False).last_hidden_state
    assert torch.equal(padded[0], expected[0]) and torch.equal(padded[1, :25], expected[1, :25])
    assert (trimmed[0] - expected[1, :25]).abs().max() < 1e-5
    names = {name.split(".")[0] for name, _ in ours.named_parameters()}
    assert names == {"embed_tokens", "layers", "norm"}, "neither vision tower nor word head"


def test_tokenizers_pad_on_the_right(tiny_base):
    checkpoint = Checkpoint.open(tiny_base)
    text = load_tokenizer(checkpoint)(["a", "a red ball"], padding=True)
    assert text["attention_mask"] == [[1, 0, 0], [1, 1, 1]]
    assert len(load_clip_tokenizer(checkpoint)("a", padding="max_length")["input_ids"]) == 77


@pytest.fixture(scope="module", params=[False, True], ids=["base", "distilled"])
def released(request, tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("released") / "tiny", request.param, dtypes="released")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_embeddings_and_modulations_stay_as_stored_and_the_rest_takes_the_working_dtype(released, dtype):
    stored = {t.name: t.dtype for t in Checkpoint.open(released)["transformer"].tensors.values()}
    model = transformer_of(released, dtype)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (stored[name] if stays_as_stored(name) else dtype), name
        assert not parameter.requires_grad
    assert Counter(p.dtype for p in model.parameters())[torch.float32] > 0


@pytest.mark.parametrize("spelling", [as_older_bundle, as_native])
def test_older_bundles_load_the_same(tiny_base, tmp_path, spelling):
    folder = linked_copy(tiny_base, tmp_path / "old")
    rewrite(folder / "transformer" / SINGLE, lambda tensors: {spelling(k): v for k, v in tensors.items()})
    same_tensors(transformer_of(folder), transformer_of(tiny_base))


@pytest.mark.parametrize("prefix", ["model.language_model.", "model."])
def test_both_layouts_of_the_text_encoder_load_the_same(tiny_base, tmp_path, prefix):
    def change(tensors):
        bare = {re.sub(r"^model\.(language_model\.)?", "", k): v for k, v in tensors.items()}
        vision = "model.visual." if "language" in prefix else "visual."
        return {
            k if k == "lm_head.weight" else re.sub(r"^visual\.", vision, k) if "visual" in k else prefix + k: v
            for k, v in bare.items()
        }

    folder = linked_copy(tiny_base, tmp_path / "old")
    rewrite(folder / "text_encoder" / "model.safetensors", change)
    ours, before = (load_text_encoder(Checkpoint.open(f), "cpu", torch.float32) for f in (folder, tiny_base))
    same_tensors(ours, before)


def test_clip_loads_with_its_prefix_and_its_stored_positions(tiny_base, tmp_path):
    def change(tensors):
        return {"text_model." + k: v for k, v in tensors.items()} | {
            "text_model.embeddings.position_ids": torch.arange(77)[None]
        }

    folder = linked_copy(tiny_base, tmp_path / "old")
    rewrite(folder / "text_encoder_2" / "model.safetensors", change)
    same_tensors(*(load_clip(Checkpoint.open(f), "cpu", torch.float32) for f in (folder, tiny_base)))


def with_vocoder_inside(folder: Path) -> None:
    vocoder = load_file(folder / "vocoder" / SINGLE)
    rewrite(folder / "audio_vae" / SINGLE, lambda t: t | {f"vocoder.{k}": v for k, v in vocoder.items()})


def test_a_vocoder_stored_twice_is_passed_over(tiny_base, tmp_path):
    folder = linked_copy(tiny_base, tmp_path / "twice")
    with_vocoder_inside(folder)
    checkpoint, plain = Checkpoint.open(folder), Checkpoint.open(tiny_base)
    same_tensors(*(load_audio_vae(c, "cpu", torch.float32) for c in (checkpoint, plain)))
    same_tensors(*(load_vocoder(c, "cpu", torch.float32) for c in (checkpoint, plain)))


def test_a_vocoder_stored_only_inside_the_audio_vae_is_found(tiny_base, tmp_path):
    folder = linked_copy(tiny_base, tmp_path / "inside")
    with_vocoder_inside(folder)
    (folder / "vocoder" / SINGLE).unlink()
    checkpoint, plain = Checkpoint.open(folder), Checkpoint.open(tiny_base)
    assert checkpoint["vocoder"].parameters == plain["vocoder"].parameters
    same_tensors(*(load_vocoder(c, "cpu", torch.float32) for c in (checkpoint, plain)))


def test_without_a_config_that_vocoder_is_taken_for_the_released_one(tiny_base, tmp_path):
    folder = linked_copy(tiny_base, tmp_path / "inside")
    with_vocoder_inside(folder)
    shutil.rmtree(folder / "vocoder")
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(CheckpointError, match=r"tensor vocoder\..* has shape .*, its config makes it \(24,\)"):
        load_vocoder(checkpoint, "cpu", torch.float32)


def test_sharded_checkpoints_load_the_same(tiny_base, tmp_path):
    folder = linked_copy(tiny_base, tmp_path / "sharded")
    shard(folder, "transformer", "diffusion_pytorch_model")
    shard(folder, "text_encoder", "model")
    checkpoint = Checkpoint.open(folder)
    assert len(checkpoint["transformer"].files) == len(checkpoint["text_encoder"].files) == 3
    same_tensors(transformer_of(folder), transformer_of(tiny_base))


def test_a_part_of_the_transformer_takes_its_part_of_the_files(tiny_base):
    """As a pipeline stage does: blocks 1 and 2 only."""
    checkpoint = Checkpoint.open(tiny_base)
    with torch.device("meta"):
        part = Transformer(checkpoint.transformer)
        part.visual_transformer_blocks[0] = torch.nn.Identity()
        del part.out_layer
    load_transformer(part, checkpoint, device="cpu", dtype=torch.float32)
    whole = transformer_of(tiny_base).state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in part.state_dict().items())
    assert not any(name.startswith(("out_layer.", "visual_transformer_blocks.0.")) for name in part.state_dict())


def test_progress_counts_every_stored_byte(tiny_base):
    told = []
    checkpoint = Checkpoint.open(tiny_base)
    load_vae(checkpoint, "cpu", torch.float32, lambda done, total: told.append((done, total)))
    assert len(told) == 248 and told == sorted(told)
    assert told[-1] == (checkpoint["vae"].nbytes, checkpoint["vae"].nbytes)


MEASURE = """
import sys
from pathlib import Path
import torch
from torch import nn
from diptych.model.headers import read_header
from diptych.model.inventory import Component
from diptych.model.loading import cast_floats, load_into

def high_water():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

file = Path(sys.argv[1])
def load():
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(2048, 1024, bias=False) for _ in range(16)))
    part = Component("x", file.parent, "X", {}, (file,), read_header(file))
    load_into(module, part, device="cpu", dtypes=cast_floats(torch.bfloat16))
    return module

first = load()  # touches the code pages and thread pools that are no part of a load
Path("/proc/self/clear_refs").write_text("5")
before = high_water()
second = load()
print(high_water() - before)
"""


def test_the_host_holds_one_tensor_beside_those_that_stay(tmp_path):
    """16 tensors of 8 MiB, held as 16 of 4 MiB: the peak is near 64 + 8 MiB, not the 128 of the file."""
    tensors = {f"{i}.weight": torch.ones(1024, 2048) for i in range(16)}
    save_file(tensors, tmp_path / "model.safetensors")
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "model.safetensors")], capture_output=True, text=True, check=True
    )
    stays, one, slack = 16 * 4 << 20, 8 << 20, 3 << 20
    assert stays <= int(run.stdout) <= stays + one + slack


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("chunk", [1000, 64 << 20], ids=["many chunks", "one chunk"])
def test_the_gpu_gets_the_same_tensors(tiny_base, chunk, monkeypatch):
    monkeypatch.setattr(loading, "_CHUNK", chunk)
    checkpoint = Checkpoint.open(tiny_base)
    there, here = (load_vae(checkpoint, device, torch.bfloat16) for device in ("cuda", "cpu"))
    assert all(p.is_cuda for p in there.parameters())
    same_tensors(there.cpu(), here)
