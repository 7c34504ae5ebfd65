"""What one rank holds of a checkpoint: transformer and video VAE everywhere, the rest on the first rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from diptych import __version__
from diptych.codecs.text import TextEncoder
from diptych.codecs.vae_fast import FastDecoder, fuse
from diptych.codecs.video import decode_cost
from diptych.engine.options import DTYPES, Options
from diptych.engine.placement import Placement, loading
from diptych.engine.progress import OnProgress
from diptych.engine.stages import Stages
from diptych.memory.allocator import grow_segments
from diptych.memory.fp8 import quantise
from diptych.memory.offload import Offloaded
from diptych.memory.tables import is_modulation, modulation_layers, park
from diptych.model.components import (
    load_audio_vae,
    load_clip,
    load_clip_tokenizer,
    load_text_encoder,
    load_tokenizer,
    load_vae,
    load_vocoder,
)
from diptych.model.loading import load_transformer, place_at
from diptych.model.transformer import Transformer
from diptych.parallel.stages import stage_blocks
from diptych.parallel.tensor import split_model
from diptych.parallel.weights import WeightSplit

_MIB = 1 << 20


@dataclass(frozen=True)
class Components:
    """Loaded and frozen, on `device` or, where `placement` says so, in host memory.

    Off the first rank only the transformer and the video VAE are there.
    """

    options: Options
    device: torch.device
    placement: Placement
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
        split: WeightSplit | None = None,
        on_progress: OnProgress | None = None,
    ) -> Components:
        """Stream the weights in. `first`: this rank also reads texts and makes sound.

        stage: of the pipeline. No other stage's blocks are read or held. split: who holds what of the others.
        The video VAE runs in float16 where the transformer does not run in float32 (as the authors run it), CLIP and
        everything that makes sound in float32 as stored.
        """
        checkpoint, dtype = options.checkpoint, options.dtype
        cpu = torch.device("cpu")
        home = device if options.offload == "none" else cpu
        tables, quantised = options.modulation == "tables", options.precision.kind == "fp8"
        visiting: dict[str, Offloaded] = {}
        if options.offload != "none" or options.memory is not None:
            grow_segments(device)
        names = ["transformer", "vae"]
        checkpoint.fingerprint  # noqa: B018 - taken now: the folder may be replaced while the engine lives
        if first:
            names += ["text_encoder", "text_encoder_2"] + ["audio_vae", "vocoder"] * checkpoint.has_audio
        sizes = {n: checkpoint[n].nbytes for n in names if n in checkpoint.components}
        total = sum(sizes.values())
        stages = Stages(on_progress)
        with stages.stage("load", max(total // _MIB, 1)) as advance, loading(options, device):
            before = 0

            def on_bytes(done: int, _: int) -> None:
                advance(min((before + done) // _MIB, total // _MIB))

            with torch.device("meta"):
                transformer = Transformer(checkpoint.transformer)
                blocks = checkpoint.transformer.num_visual_blocks
                transformer.hold(stage_blocks(blocks, options.layout.pipeline, stage))
                split = split or WeightSplit()
                cuts = split_model(transformer, split)
                if quantised:
                    quantise(transformer, exact_first=options.precision.first, exact_last=options.precision.last)
            shards = None
            if split.shard is not None:
                from diptych.parallel.shards import Shards

                shards = Shards(transformer, split.shard, cuts)
            load_transformer(
                transformer,
                checkpoint,
                device=device if quantised else home,  # what is quantised is quantised where it runs
                dtype=dtype,
                on_bytes=on_bytes,
                cuts=cuts if shards is None else shards.cuts,
                place=place_at(lambda name: cpu if tables and is_modulation(name) else home)
                if shards is None
                else shards.place,
            )
            if shards is not None:
                shards.ready()
                if tables:
                    park(transformer)
            before += sizes["transformer"]
            vae = fuse(load_vae(checkpoint, device, options.vae_dtype, on_bytes))
            before += sizes["vae"]
            placement = Placement.of(options, device, decode_cost(vae), visiting)
            if options.offload != "none":
                apart = list(modulation_layers(transformer)) if tables else []
                visiting["transformer"] = Offloaded(transformer, device, transformer.held_blocks, leave_out=apart)
                release = vae.decoder.release if isinstance(vae.decoder, FastDecoder) else None
                visiting["vae"] = Offloaded(vae, device, on_drop=release)
            if not first:
                return cls(options, device, placement, transformer.eval(), checkpoint.scheduler, vae=vae)
            form = None if options.text_precision == "exact" else options.text_precision
            language = load_text_encoder(checkpoint, device, dtype, on_bytes, form=form, home=home)
            before += sizes["text_encoder"]
            clip = load_clip(checkpoint, home, torch.float32, on_bytes)
            before += sizes["text_encoder_2"]
            if options.offload != "none":
                visiting["language"] = Offloaded(language, device, list(language.layers))
                visiting["clip"] = Offloaded(clip, device)
            text = TextEncoder(load_tokenizer(checkpoint), language, load_clip_tokenizer(checkpoint), clip)
            audio_vae = vocoder = None
            if checkpoint.has_audio:
                audio_vae = load_audio_vae(checkpoint, home, torch.float32, on_bytes)
                before += sizes["audio_vae"]
                vocoder = load_vocoder(checkpoint, home, torch.float32, on_bytes)
                if options.offload != "none":
                    visiting["sound"] = Offloaded(nn.ModuleList([audio_vae, vocoder]), device)
        scheduler = checkpoint.scheduler
        return cls(options, device, placement, transformer.eval(), scheduler, text, vae, audio_vae, vocoder)

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
            "precision": str(self.options.precision),
            "text_precision": self.options.text_precision,
            "modulation": self.options.modulation,
            "offload": self.options.offload,
            "diptych": __version__,
            "torch": torch.__version__,
        }
