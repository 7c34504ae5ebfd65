"""One folder of a checkpoint, read from its config and its safetensors headers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diptych.errors import CheckpointError
from diptych.model.catalogue import Snapshot, remote_header
from diptych.model.config import TransformerConfig
from diptych.model.headers import StoredTensor, read_header, read_json, weight_files
from diptych.model.keys import Shape, current_name, transformer_keys

Rename = Callable[[str], str | None]
"""Stored name to the name in the module; `None` for a tensor that belongs to the file but not to the module."""

CLASSES = {
    "transformer": ("Kandinsky6Transformer3DModel",),
    "vae": ("AutoencoderKLHunyuanVideo",),
    "text_encoder": ("Qwen2_5_VLForConditionalGeneration",),
    "text_encoder_2": ("CLIPTextModel",),
    "audio_vae": ("MMAudioVAE",),
    "vocoder": ("MMAudioVocoder",),
    "scheduler": ("FlowMatchEulerDiscreteScheduler", "PiflowScheduler"),
    "tokenizer": (),  # read as what the text encoders need, whatever class wrote it
    "tokenizer_2": (),
}


@dataclass(frozen=True, eq=False)
class Component:
    """One folder of a checkpoint: its config and, for a model, what its weight files hold.

    tensors: by the name they are stored under, in the order of files and data.
    """

    name: str
    folder: Path
    class_name: str
    config: Mapping[str, Any]
    files: tuple[Path, ...] = ()
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)

    def number(self, key: str, default: float) -> float:
        """A number above 0 of the config. Raises `CheckpointError` for one that is something else."""
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise CheckpointError(f"{self.folder}: {key} = {value!r} in its config should be a number above 0")
        return value

    @property
    def parameters(self) -> int:
        return sum(t.numel for t in self.tensors.values())

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def dtypes(self) -> dict[str, int]:
        """Parameters by dtype, such as `{"bfloat16": 30_136_326_248}`."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors.values():
            counts[tensor.dtype_name] += tensor.numel
        return dict(counts.most_common())


def read_component(name: str, held: list[str], snapshot: Snapshot, named: str) -> Component:
    """Read a folder of `snapshot`, whose files are `held`, without its weights.

    named: the class that model_index.json tells; some published configs tell none.
    Raises `CheckpointError` for another class, or files that are missing, truncated or disagree.
    """
    folder = snapshot.root / name
    if name.startswith("tokenizer"):
        if "tokenizer.json" not in held and "vocab.json" not in held:
            raise CheckpointError(f"{folder} holds no tokenizer.json and no vocab.json")
        return Component(name, folder, named, read_json(folder / "tokenizer_config.json"))
    config = read_json(folder / ("scheduler_config.json" if name == "scheduler" else "config.json"))
    class_name = config.get("_class_name", named)
    if class_name not in CLASSES[name]:
        raise CheckpointError(f"{folder} holds a {class_name}, where a {' or '.join(CLASSES[name])} belongs")
    if name == "scheduler":
        return Component(name, folder, class_name, config)
    files, index = weight_files(folder, held)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        here = read_header(file) if file.exists() else remote_header(snapshot, f"{name}/{file.name}")
        twice = next(iter(here.keys() & tensors.keys()), None)
        if twice is not None:
            raise CheckpointError(f"{file} holds tensor {twice}, and so does {tensors[twice].file.name}")
        tensors |= here
    for key, where in (index or {}).items():
        if key not in tensors or tensors[key].file.name != where:
            raise CheckpointError(f"{folder / where} does not hold tensor {key}, and the index says that it does")
    return Component(name, folder, class_name, config, tuple(files), tensors)


def vocoder_inside(folder: Path, audio_vae: Component) -> Component | None:
    """The vocoder whose weights stand in `audio_vae` only, as `vocoder.*`; `None` if they do not.

    Its config is in `folder`, or that of the released vocoder, which are the class's defaults.
    """
    tensors = {name: tensor for name, tensor in audio_vae.tensors.items() if name.startswith("vocoder.")}
    if not tensors:
        return None
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    return Component("vocoder", audio_vae.folder, "MMAudioVocoder", config, audio_vae.files, tensors)


def check_transformer(part: Component, config: TransformerConfig) -> None:
    """Raises `CheckpointError` for a tensor that is unknown, missing, stored twice or not of the config's shape."""
    matched(part, transformer_keys(config), current_name)


def matched(part: Component, expected: Mapping[str, Shape], rename: Rename) -> dict[str, StoredTensor]:
    """The stored tensor of every expected name, in the order of files and data.

    Raises `CheckpointError`, naming tensor and file, for one that is unknown, missing, stored twice or mis-shaped.
    """
    found: dict[str, StoredTensor] = {}
    for stored in part.tensors.values():
        name = rename(stored.name)
        if name is None:
            continue
        if name not in expected:
            raise CheckpointError(f"{stored.file}: unknown tensor {stored.name}")
        if name in found:
            raise CheckpointError(f"{stored.file}: tensor {stored.name} is also stored as {found[name].name}")
        if stored.shape != expected[name]:
            raise CheckpointError(
                f"{stored.file}: tensor {stored.name} has shape {stored.shape}, its config makes it {expected[name]}"
            )
        found[name] = stored
    missing = next((name for name in expected if name not in found), None)
    if missing is not None:
        raise CheckpointError(f"{part.folder}: tensor {missing} is missing from {_names(part.files)}")
    return found


def _names(files: tuple[Path, ...]) -> str:
    return files[0].name if len(files) == 1 else f"{files[0].name} … {files[-1].name}"
