"""Checkpoints altered on disk: copies, other spellings of tensor names, shards."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

SINGLE = "diffusion_pytorch_model.safetensors"


def linked_copy(source: Path, target: Path) -> Path:
    """A copy that shares its files: replace them, never write into them."""
    return Path(shutil.copytree(source, target, copy_function=os.link))


def rewrite(file: Path, change) -> None:
    """Replace a weight file by one with the tensors that `change` makes of its tensors."""
    tensors = change(load_file(file))
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})


def shard(folder: Path, component: str, base: str, parts: int = 3) -> Path:
    """Split a component's file into shards with an index, as large checkpoints have them."""
    file = folder / component / f"{base}.safetensors"
    tensors = load_file(file)
    file.unlink()
    names = [f"{base}-{i + 1:05}-of-{parts:05}.safetensors" for i in range(parts)]
    weight_map = {key: names[i * parts // len(tensors)] for i, key in enumerate(tensors)}
    for name in names:
        save_file({k: v for k, v in tensors.items() if weight_map[k] == name}, folder / component / name)
    index = folder / component / f"{base}.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def as_older_bundle(name: str) -> str:
    """A current name as older bundles spell it, streams apart: the reverse of what is read."""
    name = re.sub(r"_time_embeddings\.timestep_embedder\.linear_1\.", "_time_embeddings.in_layer.", name)
    name = re.sub(r"_time_embeddings\.timestep_embedder\.linear_2\.", "_time_embeddings.out_layer.", name)
    name = re.sub(r"(_text_transformer_blocks\.\d+)\.attn\.", r"\1.self_attention.", name)
    name = name.replace(".feed_forward.net.0.proj.", ".feed_forward.in_layer.")
    return name.replace(".feed_forward.net.2.", ".feed_forward.out_layer.")


def as_native(name: str) -> str:
    """As the authors' own code spells it: older bundles, with `videoT` and `audioT`."""
    return as_older_bundle(name).replace(".video_dec_block.", ".videoT.").replace(".audio_dec_block.", ".audioT.")
