"""One rank's work on a batch of clips: text, first frame, noise, denoising, decoding.

`prepare` and `finish` run on the first rank, `denoise` on all. The others help: `lend_encoder` while the first rank
prepares, `lend_decoder` while it finishes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL.Image import Image
from torch import Generator, Tensor

from diptych.codecs.audio import decode_audio
from diptych.codecs.image import empty_moments, image_moments, image_tensor, sample_first_frame
from diptych.codecs.text import Conditioning, negative_or_default
from diptych.codecs.tiles import TilePlan
from diptych.codecs.video import OnFrames, decode_video, lend_decoder
from diptych.engine.components import Components
from diptych.engine.lanes import summarise, write_traces
from diptych.engine.order import Order
from diptych.engine.sharing import Sharing, alone
from diptych.engine.stages import Stages
from diptych.engine.tracing import RankTrace, Tracer
from diptych.errors import UserError
from diptych.media.clip import Clip
from diptych.memory.tables import ModulationTables
from diptych.model.transformer import Grid
from diptych.parallel.deal import Deal
from diptych.request import ResolvedRequest
from diptych.sampling.caches import CachePlan
from diptych.sampling.denoise import denoise
from diptych.sampling.denoiser import Denoiser
from diptych.sampling.latents import Latents, draw_noise
from diptych.sampling.schedules import schedule_for


@dataclass(frozen=True)
class Job:
    """All that denoising needs, on the CPU: what the first rank sends to the others.

    lanes: conditioning with guidance off, or conditional and unconditional. first_frame (B, Y, X, C) or None.
    cache: which forwards are predicted; None computes all.
    """

    resolved: ResolvedRequest
    lanes: tuple[Conditioning, ...]
    noise: Latents
    first_frame: Tensor | None
    cache: CachePlan | None = None


@dataclass(frozen=True)
class Result:
    """Finished latents, channels last, float32, and how many forwards all lanes asked for together.

    cached: what a step cache has to report. trace: what this rank did with its time, if that was to be told.
    approximate: what was not exact in the denoising, a sentence each.
    """

    latents: Latents
    forwards: int
    trace: RankTrace | None = None
    cached: dict[str, Any] | None = None
    approximate: tuple[str, ...] = ()


class Runner:
    """Runs jobs with the components of one rank; keeps nothing from one job to the next."""

    def __init__(self, components: Components, sharing: Sharing | None = None, rank: int = 0) -> None:
        self.components, self.rank = components, rank
        self.sharing = sharing or alone(components.options.kernels)

    def generate(self, orders: Sequence[Order], stages: Stages, on_frames: OnFrames | None = None) -> list[Clip]:
        """A batch from text to clips, on this rank alone."""
        job, notes = self.prepare(orders, stages)
        result = self.denoise(job, stages)
        return self.finish(orders, result, stages, notes, [] if result.trace is None else [result.trace], on_frames)

    def _tiles(self, resolved: ResolvedRequest) -> TilePlan:
        return self.components.placement.tiles(resolved)

    @torch.no_grad()
    def prepare(self, orders: Sequence[Order], stages: Stages) -> tuple[Job, list[str]]:
        """Encode texts and images and draw the noise. Also returns what the user should be told."""
        c, first = self.components, orders[0].resolved
        c.placement.prepare(first, len(orders), tail=orders[0].image is not None, cache=orders[0].cache)
        self._tiles(first)  # a picture that cannot be decoded is refused before it is made
        limit, config = first.request.max_text_tokens, c.transformer.config
        generators = [Generator("cpu").manual_seed(order.seed) for order in orders]
        with self._moments(_images(orders)) as moments:
            with stages.stage("text", 1 + first.guided) as advance, c.placement.during("text"):
                text = c.text_encoder
                lanes = [text.encode([order.request.prompt for order in orders], limit)]
                if first.guided:
                    advance(1)
                    lanes.append(text.encode([negative_or_default(order.request.negative) for order in orders], limit))
            first_frame = None
            if orders[0].image is not None:
                with stages.stage("image", len(orders)) as advance, c.placement.during("image"):
                    frames, noise_dtype = [], getattr(torch, first.request.noise_dtype)
                    for done, (generator, encoded) in enumerate(zip(generators, moments, strict=True), start=1):
                        frames.append(sample_first_frame(c.vae, encoded, generator, noise_dtype).cpu())
                        advance(done)
                    first_frame = torch.cat(frames)
        notes = [*first.notes]
        for order in orders:
            count = text.count(order.request.prompt)
            if count > limit:
                notes.append(f"prompt cut from {count} to {limit} tokens: the model reads no more")
        noise = draw_noise([o.resolved for o in orders], generators, config.in_visual_dim, config.in_audio_dim)
        job = Job(first, tuple(lane.to("cpu") for lane in lanes), noise, first_frame, orders[0].cache)
        return job, notes

    def _moments(self, images: Sequence[Image]) -> AbstractContextManager[Iterator[Tensor]]:
        """What the encoder makes of the pictures of a batch, one after the other, made by all ranks."""
        vae, deal = self.components.vae, self.sharing.deal if len(images) > 1 else Deal()
        return deal.results(
            len(images),
            lambda n: image_moments(vae, image_tensor(images[n])),
            lambda n: empty_moments(vae, images[n].size),
        )

    def lend_encoder(self, orders: Sequence[Order]) -> None:
        """Encode this rank's pictures, while the first rank prepares. It sends for no help with a single one."""
        images, c, first = _images(orders), self.components, orders[0].resolved
        try:
            c.placement.prepare(first, len(orders), tail=bool(images), cache=orders[0].cache)
            self._tiles(first)
        except UserError:  # the first rank tells it, and encodes nothing
            return
        if len(images) > 1:
            with c.placement.during("image"):
                self.sharing.deal.lend(len(images), lambda n: image_moments(c.vae, image_tensor(images[n])))

    @torch.no_grad()
    def denoiser(self, job: Job) -> Denoiser:
        """What gives the velocities of a job on this rank; all ranks build theirs together."""
        c, r, device = self.components, job.resolved, self.components.device
        model = c.transformer
        grid: Grid = model.grid(r.T, r.Y, r.X, r.A, tail=job.first_frame is not None, device=device)
        attend, shard = self.sharing.split(grid.tokens)
        for block in model.held_blocks:
            block.video_dec_block.feed_forward.rows = c.placement.rows(grid.tokens)
        lanes = [lane.to(device) for lane in job.lanes]
        return Denoiser(
            model,
            attend,
            grid,
            [model.context(lane.text_BLD, lane.pooled_BD, lane.mask_BL) for lane in lanes],
            r.guidance,
            None if job.first_frame is None else job.first_frame.to(device),
            shard,
            self.sharing.combine,
            exact=attend.exact(),
            exact_steps=c.options.precision.steps,
            exact_blocks=c.options.precision.spared(len(model.fused_blocks)),
            pipe=None if self.sharing.pipe is None else self.sharing.pipe(shard),
        )

    @torch.no_grad()
    def denoise(self, job: Job, stages: Stages, after_step: Callable[[int], None] | None = None) -> Result:
        """From noise to latents. `after_step` is called on every rank after each step; what it raises ends the job."""
        with self.components.placement.during("denoise"):
            return self._denoise(job, stages, after_step)

    def _denoise(self, job: Job, stages: Stages, after_step: Callable[[int], None] | None) -> Result:
        c, r, device = self.components, job.resolved, self.components.device
        schedule = schedule_for(c.scheduler_config, r.steps, r.request.sigma_grid)
        denoiser = self.denoiser(job)
        if c.options.modulation == "tables":
            denoiser.tables = ModulationTables(
                c.transformer,
                schedule.timesteps,
                denoiser.contexts,
                audio=r.A > 0,
                on_host=c.options.offload != "none",
            )
        cache = denoiser.cache = None if job.cache is None else job.cache.start(r, self.sharing.agreement)
        tracer = None if c.options.trace is None else Tracer(self.rank, device, c.transformer.held_blocks)
        with stages.stage("denoise", r.steps) as advance, tracer or nullcontext():

            def on_step(index: int, clean: Callable[[], Latents]) -> None:
                wait(device)
                if tracer is not None:
                    tracer.step()
                advance(index + 1, preview=partial(_preview, clean))
                if after_step is not None:
                    after_step(index)
                if index == r.steps - 2:
                    c.placement.ahead()

            latents = denoise(denoiser.velocity, schedule, job.noise.to(device), on_step)
        cached = None if cache is None else cache.report()
        told = None if denoiser.pipe is None else denoiser.pipe.approximate(r.steps)
        approximate = () if told is None else (told,)
        return Result(latents, denoiser.forwards, None if tracer is None else tracer.trace, cached, approximate)

    @torch.no_grad()
    def lend_decoder(self, job: Job, result: Result) -> None:
        """Decode this rank's tiles, while the first rank finishes."""
        deal = self.sharing.deal
        video_BCTYX = _channels_first(deal.same(result.latents.video))
        with self.components.placement.during("picture"):
            lend_decoder(self.components.vae, video_BCTYX, self._tiles(job.resolved), deal)

    @torch.no_grad()
    def finish(
        self,
        orders: Sequence[Order],
        result: Result,
        stages: Stages,
        notes: Sequence[str],
        traces: Sequence[RankTrace],
        on_frames: OnFrames | None = None,
    ) -> list[Clip]:
        """Decode and check; traces of all ranks, if any, are written and summed up in the report.

        on_frames: told of the frames of each clip while later ones are decoded, before the check.
        Raises `ClipError` for a clip that is not fit to be called finished.
        """
        c, first = self.components, orders[0].resolved
        plan, deal = self._tiles(first), self.sharing.deal
        video_BCTYX = _channels_first(deal.same(result.latents.video.to(c.device)))
        with stages.stage("decode", len(plan.tiles) * len(orders) + bool(first.A)) as advance:
            sounds = []

            def decode_sound() -> None:
                audio = result.latents.audio
                if audio is not None:
                    audio_BCA, level = audio.permute(0, 2, 1), first.request.audio_level
                    with c.placement.during("sound"):
                        sounds.append(decode_audio(c.audio_vae, c.vocoder, audio_BCA, first.samples, level))

            with c.placement.during("picture"):
                frames = decode_video(
                    c.vae,
                    video_BCTYX,
                    plan,
                    lambda done, _: advance(done),
                    deal,
                    decode_sound,
                    at_once="sound" in c.placement.visiting,  # weights that come and go are gone before tiles need room
                    on_frames=on_frames,
                )
        sound = sounds[0] if sounds else None
        traced = {}
        if c.options.trace is not None and traces:
            write_traces(c.options.trace, traces)
            traced["trace"] = summarise(traces)
        clips, approximate = [], [*c.options.approximate, *result.approximate]
        for index, order in enumerate(orders):
            report = {
                "request": order.request.to_dict(),
                **c.describe(),
                **_forwards(order, result),
                "memory": c.placement.report(),
                "notes": list(notes),
                **({"approximate": approximate} if approximate else {}),
                "seconds": {name: round(seconds, 4) for name, seconds in stages.seconds.items()},
                **traced,
            }
            audio = None if sound is None else sound[index]
            clip = Clip(frames[index], audio, first.fps, report=report, latents=_arrays(result.latents, index))
            clip.check(order.resolved)
            clips.append(clip)
        return clips


def _images(orders: Sequence[Order]) -> list[Image]:
    """The pictures that a batch of clips begins with."""
    images = [order.image for order in orders if order.image is not None]
    assert len(images) in (0, len(orders)), "a batch has images for all of its clips or for none"
    return images


def _channels_first(video_BTYXC: Tensor) -> Tensor:
    return video_BTYXC.permute(0, 4, 1, 2, 3)


def _forwards(order: Order, result: Result) -> dict[str, Any]:
    """How many forwards were computed, and by leave of which cache the others were not."""
    if order.cache is None or result.cached is None:
        return {"forwards": {"computed": result.forwards, "total": result.forwards}}
    lanes = result.cached["lanes"]
    computed = sum(lane["computed"] for lane in lanes)
    told = {"forwards": {"computed": computed, "total": result.forwards, "lanes": lanes}}
    return told | {"cache": order.cache.describe(order.resolved) | result.cached.get("recorded", {})}


def _arrays(latents: Latents, index: int) -> dict[str, npt.NDArray[np.float32]]:
    """One clip's latents, channels first."""
    arrays = {"video": latents.video[index].permute(3, 0, 1, 2).cpu().numpy()}
    if latents.audio is not None:
        arrays["audio"] = latents.audio[index].permute(1, 0).cpu().numpy()
    return arrays


def wait(device: torch.device) -> None:
    """Let a step be over when it is told: GPUs run behind the program."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _preview(clean: Callable[[], Latents]) -> Tensor:
    """The first clip's clean latents (C, T, Y, X), float32, on the CPU."""
    return clean().video[0].permute(3, 0, 1, 2).float().cpu()
