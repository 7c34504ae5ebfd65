"""What is to be made: which checkpoint, clips of which size, how many."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diptych.errors import RequestError
from diptych.memory.footprint import RELEASED, Parts, Size
from diptych.model.catalogue import CATALOGUE
from diptych.model.checkpoint import Checkpoint
from diptych.model.config import TransformerConfig
from diptych.planner.geometry import MODELS, TEXT_TOKENS, Geometry
from diptych.request import ClipDefaults, ClipRequest

MAX_CLIPS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Task:
    """`clips` clips of one size from one checkpoint. modulation_itemsize: bytes a stored modulation weight takes."""

    model: str
    config: TransformerConfig
    geometry: Geometry
    size: Size
    parts: Parts
    clips: int = 1
    modulation_itemsize: int = 4

    @property
    def guided(self) -> bool:
        return self.size.lanes == 2


def task_of(
    model: str | Checkpoint,
    geometry: str | None = None,
    *,
    clips: int = 1,
    steps: int | None = None,
    guidance: float | None = None,
    audio: bool = True,
    text: int = TEXT_TOKENS,
) -> Task:
    """A task from what a user types.

    model: a name of the catalogue or its hub id, taken as published without looking, or a folder, whose headers are
    read; another hub id is asked for its headers. text: tokens of the prompt.

    Raises `CheckpointError` or `RequestError`, each one sentence.
    """
    if isinstance(clips, bool) or not 1 <= clips <= MAX_CLIPS:
        raise RequestError("clips", clips, f"a whole number from 1 to {MAX_CLIPS:,}")
    known = None if isinstance(model, Checkpoint) else _published(model)
    if known is not None:
        config = MODELS[known]
        defaults = ClipDefaults(
            steps=10 if config.grid > 1 else 50,
            guidance=1.0 if config.grid > 1 else 5.0,
            distilled=config.grid > 1,
        )
        parts, itemsize, name = RELEASED, 2 if config.grid > 1 else 4, str(model)
    else:
        found = model if isinstance(model, Checkpoint) else Checkpoint.open(model, weights=False)
        config, defaults, parts, itemsize, name = *_read(found), found.name
    shape = Geometry.parse(geometry) if geometry is not None else None
    request = ClipRequest(
        "a clip",
        width=None if shape is None else shape.width,
        height=None if shape is None else shape.height,
        frames=None if shape is None else shape.frames,
        steps=steps,
        guidance=guidance,
        audio=audio and defaults.has_audio,
        max_text_tokens=text,
    )
    r = request.resolve(defaults)
    size = Size(T=r.T, Y=r.Y, X=r.X, A=r.A, L=text, lanes=1 + r.guided, steps=r.steps)
    return Task(
        model=name,
        config=config,
        geometry=Geometry(r.width, r.height, r.frames),
        size=size,
        parts=parts,
        clips=clips,
        modulation_itemsize=itemsize,
    )


def _published(name: str) -> str | None:
    """The name in `MODELS` of a published checkpoint; None for a folder or another name."""
    if Path(name).expanduser().is_dir():
        return None
    short = next((key for key, hub in CATALOGUE.items() if name.lower() in (key, hub.lower())), None)
    return short and short.removesuffix("-pretrain")


def _read(checkpoint: Checkpoint) -> tuple[TransformerConfig, ClipDefaults, Parts, int]:
    return checkpoint.transformer, checkpoint.defaults, parts_of(checkpoint), modulation_itemsize(checkpoint)


def modulation_itemsize(checkpoint: Checkpoint) -> int:
    """Bytes that a stored modulation weight takes."""
    tensors = checkpoint["transformer"].tensors.values()
    return max((t.nbytes // max(t.numel, 1) for t in tensors if "modulation" in t.name), default=4)


def parts_of(checkpoint: Checkpoint) -> Parts:
    """What is around the transformer, in bytes as it is held on a GPU: language model and video VAE in 16 bit."""
    from diptych.model.keys import language_model_name

    language = layer = 0
    layers = set()
    products = []
    for tensor in checkpoint["text_encoder"].tensors.values():
        name = language_model_name(tensor.name)
        if name is None:
            continue
        language += 2 * tensor.numel
        if name.startswith("layers."):
            layers.add(name.split(".")[1])
            layer += 2 * tensor.numel
            if name.startswith("layers.0.") and len(tensor.shape) == 2:
                products.append((tensor.shape[0], tensor.shape[1]))
    sound = 0
    if checkpoint.has_audio:
        vae = (t.numel for t in checkpoint["audio_vae"].tensors.values() if not t.name.startswith("vocoder."))
        sound = 4 * (sum(vae) + checkpoint["vocoder"].parameters)
    return Parts(
        language=language,
        language_layer=layer // max(len(layers), 1),
        language_layers=len(layers),
        clip=4 * checkpoint["text_encoder_2"].parameters,
        vae=2 * checkpoint["vae"].parameters,
        sound=sound,
        language_products=tuple(products),
    )
