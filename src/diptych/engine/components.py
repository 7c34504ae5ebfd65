"""What one rank holds of a checkpoint: transformer and video VAE everywhere, the rest on the first rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from diptych import __version__
from diptych.codecs.text import TextEncoder
from diptych.codecs.vae_fast import fuse
from diptych.engine.options import DTYPES, Options
from diptych.engine.progress import OnProgress
from diptych.engine.stages import Stages
from diptych.memory.fp8 import quantise
from diptych.memory.tables import park
from diptych.model.components import (
    load_audio_vae,
    load_clip,
    load_clip_tokenizer,
    load_text_encoder,
    load_tokenizer,
    load_vae,
    load_vocoder,
)
from diptych.model.loading import load_transformer
from diptych.model.transformer import Transformer
from diptych.parallel.stages import stage_blocks

_MIB = 1 << 20


@dataclass(frozen=True)
class Components:
    """Loaded and frozen, on `device`. Off the first rank only the transformer and the video VAE are there."""

    options: Options
    device: torch.device
    transformer: Transformer
    scheduler_config: dict[str, Any]
    text_encoder: Any = None
    vae: Any = None
    audio_vae: Any = None
    vocoder: Any = None

    @classmethod
    def load(
        cls,
        options: Options,
        device: torch.device,
        *,
        first: bool,
        stage: int = 0,
        on_progress: OnProgress | None = None,
    ) -> Components:
        """Stream the weights in. `first`: this rank also reads texts and makes sound.

        stage: of the pipeline. No other stage's blocks are read or held.
        The video VAE runs in float16 where the transformer does not run in float32 (as the authors run it), CLIP and
        everything that makes sound in float32 as stored.
        """
        checkpoint, dtype = options.checkpoint, options.dtype
        vae_dtype = torch.float32 if dtype is torch.float32 or device.type == "cpu" else torch.float16
        names = ["transformer", "vae"]
        checkpoint.fingerprint  # noqa: B018 - taken now: the folder may be replaced while the engine lives
        if first:
            names += ["text_encoder", "text_encoder_2"] + ["audio_vae", "vocoder"] * checkpoint.has_audio
        sizes = {n: checkpoint[n].nbytes for n in names if n in checkpoint.components}
        total = sum(sizes.values())
        stages = Stages(on_progress)
        with stages.stage("load", max(total // _MIB, 1)) as advance:
            before = 0

            def on_bytes(done: int, _: int) -> None:
                advance(min((before + done) // _MIB, total // _MIB))

            with torch.device("meta"):
                transformer = Transformer(checkpoint.transformer)
                blocks = checkpoint.transformer.num_visual_blocks
                transformer.hold(stage_blocks(blocks, options.layout.pipeline, stage))
                if options.precision == "fp8":
                    quantise(transformer)
            load_transformer(transformer, checkpoint, device=device, dtype=dtype, on_bytes=on_bytes)
            if options.modulation == "tables":
                park(transformer)
            before += sizes["transformer"]
            vae = fuse(load_vae(checkpoint, device, vae_dtype, on_bytes))
            before += sizes["vae"]
            if not first:
                return cls(options, device, transformer.eval(), checkpoint.scheduler, vae=vae)
            language = load_text_encoder(checkpoint, device, dtype, on_bytes)
            before += sizes["text_encoder"]
            clip = load_clip(checkpoint, device, torch.float32, on_bytes)
            before += sizes["text_encoder_2"]
            text = TextEncoder(load_tokenizer(checkpoint), language, load_clip_tokenizer(checkpoint), clip)
            audio_vae = vocoder = None
            if checkpoint.has_audio:
                audio_vae = load_audio_vae(checkpoint, device, torch.float32, on_bytes)
                before += sizes["audio_vae"]
                vocoder = load_vocoder(checkpoint, device, torch.float32, on_bytes)
        return cls(options, device, transformer.eval(), checkpoint.scheduler, text, vae, audio_vae, vocoder)

    def describe(self) -> dict[str, Any]:
        """What a report says about the engine."""
        names = {dtype: name for name, dtype in DTYPES.items()}
        return {
            "checkpoint": self.options.checkpoint.name,
            "fingerprint": self.options.checkpoint.fingerprint,
            "layout": str(self.options.layout),
            "ranks": self.options.layout.world,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "dtype": names[self.options.dtype],
            "precision": self.options.precision + (f":{self.options.exact_steps}" if self.options.exact_steps else ""),
            "modulation": self.options.modulation,
            "diptych": __version__,
            "torch": torch.__version__,
        }
