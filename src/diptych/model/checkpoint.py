"""`Checkpoint`: a Kandinsky 6 folder or hub id in Diffusers layout, understood before any weight is read."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from diptych.errors import CheckpointError
from diptych.model.catalogue import CATALOGUE, OnBytes, Snapshot, fetch, hub_id, remote_header
from diptych.model.config import TransformerConfig
from diptych.model.headers import StoredTensor, read_header, read_json, weight_files
from diptych.model.keys import current_name, transformer_keys
from diptych.request import AUDIO_RATE, SAMPLES_PER_AUDIO_LATENT, ClipDefaults

PIPELINE = "Kandinsky6TI2VAPipeline"
_CLASSES = {
    "transformer": ("Kandinsky6Transformer3DModel",),
    "vae": ("AutoencoderKLHunyuanVideo",),
    "text_encoder": ("Qwen2_5_VLForConditionalGeneration",),
    "text_encoder_2": ("CLIPTextModel",),
    "audio_vae": ("MMAudioVAE",),
    "vocoder": ("MMAudioVocoder",),
    "scheduler": ("FlowMatchEulerDiscreteScheduler", "PiflowScheduler"),
    "tokenizer": ("Qwen2Tokenizer", "Qwen2TokenizerFast"),
    "tokenizer_2": ("CLIPTokenizer", "CLIPTokenizerFast"),
}
WEIGHTED = ("transformer", "vae", "text_encoder", "text_encoder_2", "audio_vae", "vocoder")
_CONFIG = {
    "scheduler": "scheduler_config.json",
    "tokenizer": "tokenizer_config.json",
    "tokenizer_2": "tokenizer_config.json",
}
_SOUND = ("audio_vae", "vocoder")
_TOKENIZERS = ("tokenizer", "tokenizer_2")
_SAMPLES, _SAMPLE_BYTES = 16, 1024


@dataclass(frozen=True, eq=False)
class Component:
    """One folder of a checkpoint: its config and, for a model, what its weight files hold.

    tensors: by the name they are stored under, in the order of files and data.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    files: tuple[Path, ...] = ()
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)

    @property
    def class_name(self) -> str:
        """As the config says; some published configs do not, then the only class that this folder may hold."""
        named = self.config.get("_class_name") or next(iter(self.config.get("architectures") or []), None)
        return str(named or self.config.get("tokenizer_class") or _CLASSES[self.name][0])

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
            counts[str(tensor.dtype).removeprefix("torch.")] += tensor.numel
        return dict(counts.most_common())


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a checkpoint holds: components, configs, dtypes and bytes, without loading any of it.

    name: as it was asked for; root: its folder; revision: the hub commit, `None` for a local folder;
    local: whether the weights are here, so that it can be loaded.
    """

    name: str
    root: Path
    revision: str | None
    local: bool
    components: Mapping[str, Component]
    transformer: TransformerConfig

    @classmethod
    def open(
        cls,
        name_or_path: str | Path,
        revision: str | None = None,
        *,
        weights: bool = True,
        on_bytes: OnBytes | None = None,
    ) -> Checkpoint:
        """Open a local folder, a catalogue name such as `lite-distill`, or a hub id.

        revision: commit, branch or tag on the hub. weights: `False` reads only headers of what is not in the cache,
        to look at a checkpoint without downloading it. on_bytes: told bytes done and in all during a download.

        Raises `CheckpointError`, one sentence, for a folder that is missing, incomplete, damaged or of another kind.
        """
        name = str(name_or_path)
        path = Path(name).expanduser()
        if name.lower() not in CATALOGUE and (isinstance(name_or_path, Path) or path.exists()):
            if revision is not None:
                raise CheckpointError(f"revision = {revision} is for the hub; {name} is a local folder")
            if not path.is_dir():
                raise CheckpointError(f"{path} is no folder" if path.exists() else f"{path} does not exist")
            files = tuple(sorted(f.relative_to(path).as_posix() for f in path.glob("*/*")))
            return cls._read(name, Snapshot(name, "", path, files), None)
        snapshot = fetch(hub_id(name), revision, weights=weights, on_bytes=on_bytes)
        return cls._read(name, snapshot, snapshot.commit)

    @classmethod
    def _read(cls, name: str, snapshot: Snapshot, revision: str | None) -> Checkpoint:
        root = snapshot.root
        if not (root / "model_index.json").is_file():
            raise CheckpointError(f"{root} is no checkpoint: it has no model_index.json, as a Diffusers folder has")
        index = read_json(root / "model_index.json")
        if index.get("_class_name") != PIPELINE:
            raise CheckpointError(f"{root} holds a {index.get('_class_name')}; only a {PIPELINE} can be run")
        absent = [part for part in _SOUND if (index.get(part) or [None])[0] is None]
        components: dict[str, Component] = {}
        for part in _CLASSES:
            held = [Path(f).name for f in snapshot.files if Path(f).parent.as_posix() == part]
            if part in absent or (part == "vocoder" and not held and _vocoder_inside(components.get("audio_vae"))):
                continue
            if not held:
                raise CheckpointError(f"{root} has no folder {part}, or nothing is in it")
            components[part] = _component(part, held, snapshot)
        config = TransformerConfig.from_dict(
            dict(components["transformer"].config), str(root / "transformer" / "config.json")
        )
        local = all(file.is_file() for c in components.values() for file in c.files)
        checkpoint = cls(name, root, revision, local, components, config)
        _check_transformer(components["transformer"], config)
        _check_agreement(checkpoint)
        return checkpoint

    def __getitem__(self, component: str) -> Component:
        """A component by its folder's name. Raises `CheckpointError` if this checkpoint has none."""
        if component not in self.components:
            raise CheckpointError(f"{self.root} has no {component}")
        return self.components[component]

    @property
    def distilled(self) -> bool:
        """Whether it was distilled: PiFlow scheduler, tenfold heads, no guidance."""
        return self.transformer.grid > 1

    @property
    def has_audio(self) -> bool:
        return "audio_vae" in self.components

    @property
    def audio_scaling_factor(self) -> float | None:
        """What audio latents are divided by before they are decoded; it differs from checkpoint to checkpoint."""
        return float(self["audio_vae"].config.get("scaling_factor", 0.417)) if self.has_audio else None

    @property
    def scheduler(self) -> dict[str, Any]:
        """The scheduler's configuration, with `_class_name`."""
        return dict(self["scheduler"].config)

    @property
    def defaults(self) -> ClipDefaults:
        """What a request is filled from, and what it may ask for."""
        return ClipDefaults(
            steps=10 if self.distilled else 50,
            guidance=1.0 if self.distilled else 5.0,
            distilled=self.distilled,
            has_audio=self.has_audio,
            has_image=self.transformer.takes_image,
        )

    @cached_property
    def fingerprint(self) -> str | None:
        """Sixteen hexadecimal digits that tell this checkpoint from others, `None` if its weights are not here.

        A hash of all configs, all headers, and 16 KiB sampled from each weight file: finetunes have equal headers.
        """
        if not self.local:
            return None
        digest = hashlib.sha256()
        for part in self.components.values():
            digest.update(json.dumps([part.name, dict(part.config)], sort_keys=True).encode())
            for t in part.tensors.values():
                digest.update(f"{t.name} {t.dtype} {t.shape} {t.offset}\n".encode())
            for file in part.files:
                size = file.stat().st_size
                with file.open("rb") as stream:
                    for i in range(_SAMPLES):
                        stream.seek(max(0, (i + 1) * size // _SAMPLES - _SAMPLE_BYTES))
                        digest.update(stream.read(_SAMPLE_BYTES))
        return digest.hexdigest()[:16]

    def describe(self) -> dict[str, Any]:
        """All of it as JSON holds it: what `diptych checkpoint inspect --json` prints."""
        parts = {
            name: {
                "class": part.class_name,
                "files": len(part.files),
                "tensors": len(part.tensors),
                "parameters": part.parameters,
                "bytes": part.nbytes,
                "dtypes": part.dtypes,
                "config": dict(part.config),
            }
            for name, part in self.components.items()
        }
        defaults = self.defaults
        return {
            "name": self.name,
            "root": str(self.root),
            "revision": self.revision,
            "fingerprint": self.fingerprint,
            "kind": "distilled" if self.distilled else "base",
            "steps": defaults.steps,
            "guidance": defaults.guidance,
            "has_audio": defaults.has_audio,
            "has_image": defaults.has_image,
            "audio_scaling_factor": self.audio_scaling_factor,
            "scheduler": self.scheduler,
            "parameters": sum(p.parameters for p in self.components.values()),
            "bytes": sum(p.nbytes for p in self.components.values()),
            "components": parts,
        }


def _component(name: str, held: list[str], snapshot: Snapshot) -> Component:
    folder = snapshot.root / name
    if name in _TOKENIZERS:
        if "tokenizer.json" not in held and "vocab.json" not in held:
            raise CheckpointError(f"{folder} holds no tokenizer.json and no vocab.json")
    config = read_json(folder / _CONFIG.get(name, "config.json"))
    part = Component(name, folder, config)
    if part.class_name not in _CLASSES[name]:
        raise CheckpointError(f"{folder} holds a {part.class_name}, where a {' or '.join(_CLASSES[name])} belongs")
    if name not in WEIGHTED:
        return part
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
    return Component(name, folder, config, tuple(files), tensors)


def _vocoder_inside(audio_vae: Component | None) -> bool:
    return audio_vae is not None and any(name.startswith("vocoder.") for name in audio_vae.tensors)


def _check_transformer(part: Component, config: TransformerConfig) -> None:
    expected = transformer_keys(config)
    seen: dict[str, StoredTensor] = {}
    for stored in part.tensors.values():
        name = current_name(stored.name)
        if name not in expected:
            raise CheckpointError(f"{stored.file}: unknown tensor {stored.name}")
        if name in seen:
            raise CheckpointError(f"{stored.file}: tensor {stored.name} is also stored as {seen[name].name}")
        if stored.shape != expected[name]:
            raise CheckpointError(
                f"{stored.file}: tensor {stored.name} has shape {stored.shape}, its config makes it {expected[name]}"
            )
        seen[name] = stored
    missing = next((name for name in expected if name not in seen), None)
    if missing is not None:
        raise CheckpointError(f"{part.folder}: tensor {missing} is missing from {_names(part.files)}")


def _check_agreement(c: Checkpoint) -> None:
    """Refuse components that cannot work together, before the first of them is loaded."""
    t, index = c.transformer, c.root
    piflow = c["scheduler"].class_name == "PiflowScheduler"
    grid = int(c["scheduler"].config.get("n_grid", 10)) if piflow else 1
    text = c["text_encoder"].config
    vae = c["vae"].config
    checks = [
        (
            "transformer out_visual_dim",
            t.out_visual_dim,
            t.in_visual_dim * grid,
            "in_visual_dim times scheduler n_grid",
        ),
        ("transformer out_audio_dim", t.out_audio_dim, t.in_audio_dim * grid, "in_audio_dim times scheduler n_grid"),
        ("transformer in_text_dim", t.in_text_dim, text.get("text_config", text).get("hidden_size"), "text_encoder"),
        ("transformer in_text_dim2", t.in_text_dim2, c["text_encoder_2"].config.get("hidden_size"), "text_encoder_2"),
        ("transformer in_visual_dim", t.in_visual_dim, vae.get("latent_channels", 16), "vae latent_channels"),
        ("vae spatial_compression_ratio", vae.get("spatial_compression_ratio", 8), 8, "what Kandinsky 6 has"),
        ("vae temporal_compression_ratio", vae.get("temporal_compression_ratio", 4), 4, "what Kandinsky 6 has"),
    ]
    if c.has_audio:
        audio = c["audio_vae"].config
        hop = 2 * audio.get("hop_length", 512)
        checks += [
            ("transformer in_audio_dim", t.in_audio_dim, audio.get("latent_channels", 40), "audio_vae latent_channels"),
            ("audio_vae sample_rate", audio.get("sample_rate", AUDIO_RATE), AUDIO_RATE, "what Kandinsky 6 has"),
            ("audio_vae hop_length doubled", hop, SAMPLES_PER_AUDIO_LATENT, "what Kandinsky 6 has"),
        ]
    for what, value, expected, of in checks:
        if value != expected:
            raise CheckpointError(f"{index}: {what} = {value} does not fit: {of} makes it {expected}")


def _names(files: tuple[Path, ...]) -> str:
    return files[0].name if len(files) == 1 else f"{files[0].name} … {files[-1].name}"
