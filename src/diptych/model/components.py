"""The models around the transformer, loaded from a checkpoint in their stock classes: frozen, in evaluation mode."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from diptych.errors import CheckpointError
from diptych.model.catalogue import OnBytes
from diptych.model.checkpoint import Checkpoint
from diptych.model.inventory import Component, Rename
from diptych.model.keys import language_model_name
from diptych.model.loading import ParametersOnMeta, Place, cast_floats, load_into, place_at
from diptych.model.quantised import quantise_linears

if TYPE_CHECKING:
    from diffusers import AutoencoderKLHunyuanVideo, MMAudioVAE, MMAudioVocoder
    from transformers import CLIPTextModel, CLIPTokenizer, Qwen2_5_VLTextModel, Qwen2Tokenizer

M = TypeVar("M", bound=nn.Module)
Device = torch.device | str


def load_vae(
    checkpoint: Checkpoint, device: Device, dtype: torch.dtype, on_bytes: OnBytes | None = None
) -> AutoencoderKLHunyuanVideo:
    """The video VAE: pixels (B, 3, F, H, W) in [-1, 1] to 16 latent channels, 8x8x4 smaller, and back."""
    from diffusers import AutoencoderKLHunyuanVideo

    return _diffusers(AutoencoderKLHunyuanVideo, checkpoint["vae"], device, dtype, on_bytes)


def load_audio_vae(
    checkpoint: Checkpoint, device: Device, dtype: torch.dtype, on_bytes: OnBytes | None = None
) -> MMAudioVAE:
    """The audio VAE: latents (B, 40, A) to mel spectrograms (B, 128, 2A), and sound to latents.

    A vocoder stored in the same folder is passed over.
    """
    from diffusers import MMAudioVAE

    def rename(name: str) -> str | None:
        return None if name.startswith("vocoder.") else name

    return _diffusers(MMAudioVAE, checkpoint["audio_vae"], device, dtype, on_bytes, rename)


def load_vocoder(
    checkpoint: Checkpoint, device: Device, dtype: torch.dtype, on_bytes: OnBytes | None = None
) -> MMAudioVocoder:
    """The vocoder: mel spectrograms (B, 128, M) to sound (B, 1, 512 M) in [-1, 1].

    From its own folder, or from the copy in `audio_vae` where there is no other.
    """
    from diffusers import MMAudioVocoder

    def rename(name: str) -> str:
        return name.removeprefix("vocoder.")

    return _diffusers(MMAudioVocoder, checkpoint["vocoder"], device, dtype, on_bytes, rename)


def load_text_encoder(
    checkpoint: Checkpoint,
    device: Device,
    dtype: torch.dtype,
    on_bytes: OnBytes | None = None,
    *,
    form: str | None = None,
    home: Device | None = None,
) -> Qwen2_5_VLTextModel:
    """The language model of Qwen2.5-VL: token ids (B, L) to `last_hidden_state` (B, L, in_text_dim), after the norm.

    That is `hidden_states[-1]` of the whole model. Its vision tower and word head, 1.2 billion parameters, serve
    prompt expansion only and are not read.

    form: one of `FORMS`, in which the linear layers of its blocks are held; embeddings and norms stay as they are. A
    weight is quantised on `device` as it is read, and put to rest on `home`: never more than one is there whole.
    """
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLTextModel

    part = checkpoint["text_encoder"]
    with _understood(part.folder), ParametersOnMeta():
        config = Qwen2_5_VLConfig.from_pretrained(part.folder).text_config
        model = Qwen2_5_VLTextModel(config)
    if form is None:
        return _fill(model, part, home or device, dtype, on_bytes, language_model_name)
    quantise_linears(model, form)
    place = None if home is None else place_at(lambda _: torch.device(home))
    return _fill(model, part, device, dtype, on_bytes, language_model_name, place)


def load_clip(
    checkpoint: Checkpoint, device: Device, dtype: torch.dtype, on_bytes: OnBytes | None = None
) -> CLIPTextModel:
    """CLIP's text model: 77 token ids (B, 77) to `pooler_output` (B, in_text_dim2)."""
    from transformers import CLIPTextConfig, CLIPTextModel

    part = checkpoint["text_encoder_2"]
    with _understood(part.folder), ParametersOnMeta():
        model = CLIPTextModel(CLIPTextConfig.from_pretrained(part.folder))
    prefix = "text_model." if "text_model.final_layer_norm.weight" in model.state_dict() else ""

    def rename(name: str) -> str | None:
        bare = re.sub(r"^text_model\.", "", name)
        return None if bare == "embeddings.position_ids" else prefix + bare

    return _fill(model, part, device, dtype, on_bytes, rename)


def load_tokenizer(checkpoint: Checkpoint) -> Qwen2Tokenizer:
    """Qwen's tokenizer, padding on the right whatever the file says: the template is cut off at the left."""
    from transformers import Qwen2Tokenizer

    folder = checkpoint["tokenizer"].folder
    with _understood(folder):
        tokenizer = Qwen2Tokenizer.from_pretrained(folder)
    tokenizer.padding_side = "right"
    return tokenizer


def load_clip_tokenizer(checkpoint: Checkpoint) -> CLIPTokenizer:
    """CLIP's tokenizer."""
    from transformers import CLIPTokenizer

    folder = checkpoint["tokenizer_2"].folder
    with _understood(folder):
        return CLIPTokenizer.from_pretrained(folder)


@contextmanager
def _understood(folder: Path) -> Iterator[None]:
    """The stock classes raise anything at all on files that they cannot be made from."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(f"{folder} holds a file that is not accepted: {why}") from error


def _diffusers(
    kind: type[M],
    part: Component,
    device: Device,
    dtype: torch.dtype,
    on_bytes: OnBytes | None,
    rename: Rename = str,
) -> M:
    with _understood(part.folder), ParametersOnMeta():
        model: M = kind.from_config(dict(part.config))  # type: ignore[attr-defined]
    return _fill(model, part, device, dtype, on_bytes, rename)


def _fill(
    model: M,
    part: Component,
    device: Device,
    dtype: torch.dtype,
    on_bytes: OnBytes | None,
    rename: Rename,
    place: Place | None = None,
) -> M:
    load_into(model, part, device=device, dtypes=cast_floats(dtype), rename=rename, on_bytes=on_bytes, place=place)
    return model.eval()
