"""Forwards under every layout, whole clips, and the decode, with random weights."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from diptych.attention import APPROXIMATE, LocalAttend, Role
from diptych.attention.kernels import bounds_pay
from diptych.bench.forward import machine, relative, shortened
from diptych.bench.geometry import Geometry, Inputs, config_named, random_inputs, random_transformer
from diptych.bench.layouts import measure_layout
from diptych.bench.random_clip import GUIDANCE, Decoders, decoded, denoised
from diptych.engine.lanes import all_busy, summarise
from diptych.engine.sharing import Sharing, alone, sharing_for
from diptych.engine.tracing import Tracer
from diptych.memory.fp8 import quantise
from diptych.model.transformer import TextContext, Transformer
from diptych.parallel import Layout, SequenceAttend
from diptych.parallel.deal import Deal
from diptych.parallel.guidance import guided
from diptych.sampling.denoiser import Denoiser
from diptych.sampling.latents import Latents

if TYPE_CHECKING:
    from multi_gpu_ranks import Bench

EXPECTED = {"pro": 7.2, "pro-distill": 7.2, "lite": 1.7}
"""Seconds of one forward on one H200, to tell whether there is time left for a measurement."""
FASTER = 1.35
"""How much faster fp8 is expected to be, for the same end."""


def layouts(world: int, *, distilled: bool) -> list[Layout]:
    """What is measured on `world` ranks, the most telling first."""
    if world == 1:
        return [Layout()]
    found = [Layout(ulysses=world)]
    if not distilled:
        found.append(Layout(cfg=2, ulysses=world // 2))
    if world > 2:
        found.append(Layout(ring=2, ulysses=world // 2))
    found.append(Layout(ring=world))
    return found


def size_of(bench: Bench) -> Geometry:
    return Geometry.parse("64x32x9" if bench.quick else "864x480x125")


def forwards(bench: Bench, name: str) -> None:
    """One model: forwards in bf16, a clip of a distilled one, the same in fp8; beside what one rank had to say."""
    size, device = size_of(bench), bench.device
    config = config_named(name)
    if bench.quick:
        config = config_named("tiny-distill" if config.grid > 1 else "tiny", 2)
    bench.note("machine", machine(device))
    model = random_transformer(config, device, torch.bfloat16)
    inputs = random_inputs(config, size, 9 if bench.quick else 200, device, torch.bfloat16)
    run = _Run(bench, name, model, inputs, size)
    run.all_layouts("bf16", {})
    if bench.world == 1:
        run.yardstick()
        run.predictions()
    else:
        run.clip("bf16", {})
    quantise(model)
    bench.free()
    run.all_layouts("fp8", APPROXIMATE)
    if bench.world > 1:
        run.clip("fp8", APPROXIMATE)


class _Run:
    """One model on the ranks of `bench`."""

    def __init__(self, bench: Bench, name: str, model: Transformer, inputs: Inputs, size: Geometry) -> None:
        self.bench, self.name, self.model, self.inputs, self.size = bench, name, model, inputs, size
        self.distilled = model.config.grid > 1
        self.lanes = 1 if self.distilled else 2
        self.contexts = [
            model.context(inputs.text * sign, inputs.pooled * sign, None) for sign in (1, -1)[: self.lanes]
        ]
        self.grid = model.grid(*size.latents, size.audio_tokens, tail=False, device=bench.device)
        self.latents = Latents(inputs.video[..., : model.config.in_visual_dim].float(), inputs.audio.float())
        self.timestep = inputs.timestep.cpu()[0]

    def all_layouts(self, precision: str, kernels: dict[Role, str]) -> None:
        for layout in layouts(self.bench.world, distilled=self.distilled):
            label = f"{precision}, {layout}"
            ranks_a_lane = layout.world // layout.cfg
            one = EXPECTED.get(self.name, 1.0) / ranks_a_lane / (FASTER if precision == "fp8" else 1)
            if self.bench.room(label, (2 if self.name.startswith("pro") else 4) * one + 2):
                self.bench.note(label, self.measure(layout, precision, kernels))

    def measure(self, layout: Layout, precision: str, kernels: dict[Role, str]) -> dict[str, Any]:
        """Seconds of a forward and a step, the memory, how busy the ranks were, and how far one rank's answer is."""
        bench = self.bench
        sharing = self.sharing(layout, kernels)
        both = layout.cfg == 2
        call = self.velocity(sharing, self.contexts if both else self.contexts[:1])
        with shortened(self.model):
            first = bench.wall(call)
        bench.free()
        kept: list[Latents] = []
        times = [bench.wall(lambda: kept.append(call()))]
        peak = torch.cuda.max_memory_allocated() / 2**30 if bench.device.type == "cuda" else 0.0
        if self.name == "lite" and not bench.quick:
            times += [bench.wall(call) for _ in range(2)]
        spent = min(times)
        found: dict[str, Any] = {
            "forward s": spent,
            "step s": spent if both else spent * self.lanes,
            "all s": times,
            "first, two blocks, s": first,
            "peak GiB": bench.most(peak),
        }
        if bench.world == 1:
            self.keep(precision, kept[0], sharing)
        else:
            found["error"] = self.error(precision, kept[0], both)
            found["alike on all ranks"] = self.alike(kept[0])
            if not self.distilled:  # its blocks are those of the base model
                found |= self.busy(call)
        return found

    def sharing(self, layout: Layout, kernels: dict[Role, str]) -> Sharing:
        """Groups of ranks are made once for all models and precisions: connecting them takes its time."""
        if layout.world == 1:
            return alone(kernels)
        made = self.bench.made
        if layout not in made:
            sharing = sharing_for(layout, self.bench.device)
            made[layout] = sharing, sharing.split(self.grid.tokens)[1]
        sharing, shard = made[layout]
        attend = LocalAttend(kernels) if shard is None else SequenceAttend(shard, kernel=kernels)
        return replace(sharing, split=lambda tokens: (attend, shard))

    def velocity(self, sharing: Sharing, contexts: list[TextContext]) -> Callable[[], Latents]:
        attend, shard = sharing.split(self.grid.tokens)
        guidance = GUIDANCE if len(contexts) == 2 else 1.0
        denoiser = Denoiser(self.model, attend, self.grid, contexts, guidance, None, shard, sharing.combine)
        return lambda: denoiser.velocity(self.latents, self.timestep)

    def keep(self, precision: str, first: Latents, sharing: Sharing) -> None:
        """One rank's velocities, of one lane and guided, for the worlds to come."""
        answers = {"lane": [first.video.cpu(), _cpu(first.audio)]}
        if self.lanes == 2:
            second = self.velocity(sharing, self.contexts[1:])()
            video, audio = guided(first.video, second.video, GUIDANCE), None
            if first.audio is not None and second.audio is not None:
                audio = guided(first.audio, second.audio, GUIDANCE)
            answers["guided"] = [video.cpu(), _cpu(audio)]
        torch.save(answers, self.bench.folder / f"{self.name}-{precision}.pt")

    def error(self, precision: str, got: Latents, both: bool) -> Any:
        """Relative error of picture and sound to one rank's."""
        file = self.bench.folder / f"{self.name}-{precision}.pt"
        if not file.exists():
            return "nothing to compare with: one rank did not come to it"
        want = torch.load(file)["guided" if both else "lane"]
        return [relative(g.cpu(), w) for g, w in zip(got, want, strict=True) if g is not None]

    def alike(self, got: Latents) -> bool:
        """Whether all ranks have the same bits: else the next steps would drift apart."""
        sums = [x.view(torch.uint8).long().sum().item() for x in got if x is not None]
        return len({tuple(of_rank) for of_rank in self.bench.gather(sums)}) == 1

    def busy(self, call: Callable[[], Latents]) -> dict[str, Any]:
        """Share of the time in which every rank computed, from a traced forward, and what each did.

        What tracing itself trips over is told, and costs no measurement beside it.
        """
        try:
            return self._traced(call)
        except Exception:
            return {"tracing failed": traceback.format_exc()[-1500:]}

    def _traced(self, call: Callable[[], Latents]) -> dict[str, Any]:
        tracer = Tracer(self.bench.rank, self.bench.device, self.model.fused_blocks)
        self.bench.most(0.0)
        with tracer:
            call()
            self.bench.wait()
            tracer.step()
        traces = self.bench.gather(tracer.trace)
        return {"all busy": all_busy(traces), "ranks": summarise(traces)["ranks"]}

    def yardstick(self) -> None:
        """How far two exact attention kernels are apart on one rank: what bf16 leaves open."""
        device = self.bench.device
        cuda = "sdpa-cudnn" if bounds_pay(device, torch.bfloat16, 128) else "sdpa-flash"
        other = cuda if device.type == "cuda" else "sdpa-math"
        if self.distilled or not self.bench.room("yardstick", EXPECTED.get(self.name, 1.0) * 1.5):
            return
        try:
            got = self.velocity(alone({Role.VISUAL_SELF: other}), self.contexts[:1])()
            self.bench.note(f"yardstick: {other}", self.error("bf16", got, both=False))
        except Exception:
            self.bench.note("yardstick", {"failed": traceback.format_exc()[-1500:]})

    def predictions(self) -> None:
        """Compute and bytes of one rank of the worlds to come, played on this one."""
        if self.distilled:
            return
        for world in self.bench.worlds:
            for layout in layouts(world, distilled=False):
                label = f"simulated, {layout}"
                if layout.cfg == 2 and layout.sequence == 1:
                    continue  # one lane on one rank: measured above
                each = EXPECTED.get(self.name, 1.0) / layout.sequence
                if not self.bench.room(label, 2.5 * each):
                    continue
                try:
                    row = measure_layout(layout, self.model, self.inputs, self.size, device=self.bench.device)
                except Exception:
                    row = {"failed": traceback.format_exc()[-1500:]}
                self.bench.note(label, row)

    def clip(self, precision: str, kernels: dict[Role, str]) -> None:
        """A distilled model's ten forwards and the decode, on all ranks' first layout."""
        layout = layouts(self.bench.world, distilled=self.distilled)[0]
        label = f"clip, {precision}, {layout}"
        steps = 2 if self.bench.quick else 10
        each = EXPECTED.get(self.name, 1.0) / self.bench.world / (FASTER if precision == "fp8" else 1)
        if not self.distilled or not self.bench.room(label, 1.15 * steps * each + 8):
            return
        latents, spent = denoised(
            self.model,
            self.contexts,
            self.size,
            self.sharing(layout, kernels),
            device=self.bench.device,
            steps=steps,
            on_step=lambda step: self.bench.note(label, {"steps done": step + 1}),
        )
        found = {"denoise s": self.bench.most(sum(spent)), "steps s": spent}
        self.bench.note(label, found)
        times = decode_times(self.bench, latents, self.size)[0]
        self.bench.note(label, found | {"decode and sound s": times[-1], "clip s": found["denoise s"] + times[-1]})


def decode(bench: Bench) -> None:
    """Picture and sound of random latents on all ranks: seconds, and whether the frames are those of one rank."""
    size = size_of(bench)
    generator = torch.Generator("cpu").manual_seed(3)
    latents = Latents(
        torch.randn(1, *size.latents, 16, generator=generator),
        torch.randn(1, size.audio_tokens, 40, generator=generator),
    ).to(bench.device)
    times, frames = decode_times(bench, latents, size)
    bench.note("decode s", times)
    if frames is None:
        return
    file = bench.folder / "frames.npy"
    if bench.world == 1:
        np.save(file, frames)
    elif file.exists():
        bench.note("values that differ", float((frames != np.load(file)).mean()))


def decode_times(bench: Bench, latents: Latents, size: Geometry) -> tuple[list[float], Any]:
    """Seconds of a first decode on all ranks and of a second one; the frames, on the first rank."""
    if "decoders" not in bench.made:
        bench.made["decoders"] = Decoders.random(bench.device, small=bench.quick, sound=bench.rank == 0)
    deal = Deal(bench.rank, bench.world) if bench.world > 1 else None
    frames = []
    times = [
        bench.wall(lambda: frames.append(decoded(latents, bench.made["decoders"], size, deal=deal))) for _ in range(2)
    ]
    return times, frames[-1]


def _cpu(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.cpu()
