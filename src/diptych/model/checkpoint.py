"""`Checkpoint`: a Kandinsky 6 folder or hub id in Diffusers layout, understood before any weight is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from diptych.errors import CheckpointError, RequestError
from diptych.model.catalogue import BUILT_IN, CATALOGUE, OnBytes, Snapshot, fetch, hub_id
from diptych.model.config import TransformerConfig
from diptych.model.headers import read_json
from diptych.model.inventory import CLASSES, Component, check_transformer, read_component, vocoder_inside
from diptych.request import AUDIO_RATE, SAMPLES_PER_AUDIO_LATENT, ClipDefaults, ClipRequest

PIPELINE = "Kandinsky6TI2VAPipeline"
_SOUND = ("audio_vae", "vocoder")
_SAMPLES, _SAMPLE_BYTES = 16, 1024


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
        """Open a local folder, a catalogue name such as `lite-distill`, a hub id, or `demo`, the model in the package.

        revision: commit, branch or tag on the hub. weights: `False` reads only headers of what is not in the cache,
        to look at a checkpoint without downloading it. on_bytes: told bytes done and in all during a download.

        Raises `CheckpointError`, one sentence, for a folder that is missing, incomplete, damaged or of another kind.
        """
        name = str(name_or_path)
        try:
            path = Path(name).expanduser()
            there = path.exists()
        except (OSError, RuntimeError) as error:  # too long, behind a closed door, the home of nobody
            why = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{name[:80]} cannot be opened: {why}") from None
        if name_or_path == "demo":
            path = name_or_path = BUILT_IN
            there = path.is_dir()
            if not there:
                raise CheckpointError(
                    "the small model is missing from this installation; install diptych again, or name a checkpoint, "
                    "such as lite-distill"
                )
        if name.lower() not in CATALOGUE and (isinstance(name_or_path, Path) or there):
            if revision is not None:
                raise CheckpointError(f"revision = {revision} is for the hub; {name} is a local folder")
            if not path.is_dir():
                raise CheckpointError(f"{path} is no folder" if there else f"{path} does not exist")
            files = tuple(sorted(f.relative_to(path).as_posix() for f in path.glob("*/*")))
            return cls._read(name, Snapshot(name, "", path.absolute(), files), None)
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
        named = {part: _class_named(index, part, root / "model_index.json") for part in CLASSES}
        silent = any(named[part] is None for part in _SOUND)
        components: dict[str, Component] = {}
        for part in CLASSES:
            held = [Path(f).name for f in snapshot.files if Path(f).parent.as_posix() == part]
            if part in _SOUND and silent:
                continue
            if part == "vocoder" and not any(name.endswith(".safetensors") for name in held):
                inside = vocoder_inside(root / part, components["audio_vae"])
                if inside is not None:
                    components[part] = inside
                    continue
            if not held:
                raise CheckpointError(f"{root} has no folder {part}, or nothing is in it")
            components[part] = read_component(part, held, snapshot, str(named[part]))
        config = TransformerConfig.from_dict(
            dict(components["transformer"].config), str(root / "transformer" / "config.json")
        )
        local = all(file.is_file() for c in components.values() for file in c.files)
        checkpoint = cls(name, root, revision, local, components, config)
        check_transformer(components["transformer"], config)
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
        return self["audio_vae"].number("scaling_factor", 0.417) if self.has_audio else None

    @property
    def scheduler(self) -> dict[str, Any]:
        """The scheduler's configuration, with `_class_name`."""
        return dict(self["scheduler"].config)

    @property
    def defaults(self) -> ClipDefaults:
        """What a request is filled from, and what it may ask for.

        The published values, unless the folder has a `diptych.json` that says otherwise for some of width, height,
        frames, fps, steps, guidance and example. Raises `CheckpointError` for one that cannot be.
        """
        published = ClipDefaults(
            steps=10 if self.distilled else 50,
            guidance=1.0 if self.distilled else 5.0,
            distilled=self.distilled,
            has_audio=self.has_audio,
            has_image=self.transformer.takes_image,
        )
        file = self.root / "diptych.json"
        if not file.is_file():
            return published
        own = read_json(file)
        strange = sorted(set(own) - {"width", "height", "frames", "fps", "steps", "guidance", "example"})
        if strange:
            raise CheckpointError(f"{file}: unknown key {strange[0]}")
        try:
            ClipRequest(own.get("example", "a clip"), **{name: own[name] for name in own if name != "example"})
        except RequestError as error:
            raise CheckpointError(f"{file}: {error}") from None
        return replace(published, **own)

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
                digest.update(f"{t.name} torch.{t.dtype_name} {t.shape} {t.offset}\n".encode())
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


def _class_named(index: Mapping[str, Any], part: str, file: Path) -> str | None:
    """The class that model_index.json tells for a component, a list of library and class; `None` if it has none."""
    entry = index.get(part) or [None, None]
    if not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(n, str | None) for n in entry):
        raise CheckpointError(f"{file}: {part} should be a list of a library and a class, not {json.dumps(entry)}")
    return entry[1] if entry[0] else None


def _check_agreement(c: Checkpoint) -> None:
    """Refuse components that cannot work together, before the first of them is loaded."""
    t, index = c.transformer, c.root
    piflow = c["scheduler"].class_name == "PiflowScheduler"
    grid = c["scheduler"].number("n_grid", 10) if piflow else 1
    text = c["text_encoder"].config.get("text_config", c["text_encoder"].config)
    if not isinstance(text, dict):
        raise CheckpointError(f"{c['text_encoder'].folder / 'config.json'}: text_config should be a JSON object")
    vae = c["vae"].config
    checks = [
        (
            "transformer out_visual_dim",
            t.out_visual_dim,
            t.in_visual_dim * grid,
            "in_visual_dim times scheduler n_grid",
        ),
        ("transformer out_audio_dim", t.out_audio_dim, t.in_audio_dim * grid, "in_audio_dim times scheduler n_grid"),
        ("transformer in_text_dim", t.in_text_dim, text.get("hidden_size"), "text_encoder"),
        ("transformer in_text_dim2", t.in_text_dim2, c["text_encoder_2"].config.get("hidden_size"), "text_encoder_2"),
        ("transformer in_visual_dim", t.in_visual_dim, vae.get("latent_channels", 16), "vae latent_channels"),
        ("vae spatial_compression_ratio", vae.get("spatial_compression_ratio", 8), 8, "what Kandinsky 6 has"),
        ("vae temporal_compression_ratio", vae.get("temporal_compression_ratio", 4), 4, "what Kandinsky 6 has"),
    ]
    if c.has_audio:
        audio = c["audio_vae"].config
        hop = 2 * c["audio_vae"].number("hop_length", 512)
        checks += [
            ("transformer in_audio_dim", t.in_audio_dim, audio.get("latent_channels", 40), "audio_vae latent_channels"),
            ("audio_vae sample_rate", audio.get("sample_rate", AUDIO_RATE), AUDIO_RATE, "what Kandinsky 6 has"),
            ("audio_vae hop_length doubled", hop, SAMPLES_PER_AUDIO_LATENT, "what Kandinsky 6 has"),
        ]
    for what, value, expected, of in checks:
        if value != expected:
            raise CheckpointError(f"{index}: {what} = {value} does not fit: {of} makes it {expected}")
