"""What TF32 would do to the codecs that run in float32: seconds and error, with it and without."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from diptych.bench.forward import relative
from diptych.bench.random_clip import Decoders
from diptych.codecs import audio
from diptych.codecs.float32 import full_float32
from h200_common import DEVICE, SIZE, TINY, ms

CPU = torch.device("cpu")
LONG, SHORT = SIZE.audio_tokens, 4 if TINY else 32


def tf32() -> dict[str, Any]:
    """Decoding the sound of a clip, random weights: as we do it in float32, and as torch does by itself (TF32).

    Errors are of a short piece: of the whole decode against a CPU's in float32, of the vocoder alone against float64.
    """
    parts, torch_alone = Decoders.random(DEVICE, small=TINY), (lambda dtype: nullcontext())
    result: dict[str, Any] = {"audio latents": LONG, "latents of the errors": SHORT}
    latents = draw(40, LONG).to(DEVICE)
    piece, mel = draw(40, SHORT), draw(parts.vocoder.config.num_mels, 2 * SHORT)

    def sound(x: Tensor) -> Tensor:
        samples = math.ceil(x.shape[-1] * 1024)
        return torch.from_numpy(audio.decode_audio(parts.audio_vae, parts.vocoder, x, samples))

    def vocode(context: Callable[[torch.dtype], Any]) -> Tensor:
        with context(torch.float32):
            return parts.vocoder(mel.to(DEVICE), return_dict=False)[0].cpu()

    ways = {"float32": full_float32, "torch alone": torch_alone}
    made, waves = {}, {}
    for name, context in ways.items():
        audio.full_float32 = context  # type: ignore[assignment]
        result[f"{name}, ms"] = ms(lambda: sound(latents), 5)
        made[name], waves[name] = sound(piece), vocode(context)
    audio.full_float32 = full_float32
    parts.audio_vae.to(CPU)
    parts.vocoder.to(CPU)
    want = sound(piece)
    truth = parts.vocoder.double()(mel.double(), return_dict=False)[0]
    for name in ways:
        result[f"{name}, off a CPU"] = relative(made[name], want)
        result[f"{name}, vocoder off float64"] = float((waves[name].double() - truth).norm() / truth.norm())
    return result | {"slower by": result["float32, ms"] / result["torch alone, ms"]}


def draw(*shape: int) -> Tensor:
    return torch.randn(1, *shape, generator=torch.Generator().manual_seed(1))
