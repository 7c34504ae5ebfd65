"""Which weights are on the device in which stage of a clip, and whether it all fits what it may take."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from diptych.codecs.tiles import TileCost, TilePlan, decode_peak, fused_cost, plan_tiles, released_cost
from diptych.engine.options import Options
from diptych.errors import DeviceMemoryError, RequestError
from diptych.memory.allocator import ran_out
from diptych.memory.budget import Decode, Plan, Planner, modes, shown, slack
from diptych.memory.footprint import GIB, Offload, Parts, Setting, Size, transformer_weights
from diptych.memory.offload import Offloaded
from diptych.model.ops import runs_kernels
from diptych.planner.options import check_offload
from diptych.planner.task import modulation_itemsize, parts_of
from diptych.request import ClipRequest, ResolvedRequest
from diptych.sampling.caches import CachePlan

STAGES: dict[str, tuple[str, ...]] = {
    "text": ("language", "clip"),
    "image": ("vae",),
    "denoise": ("transformer",),
    "picture": ("vae",),
    "sound": ("sound",),
}
"""The offloaded components that each stage has on the device."""


def parts_held(options: Options) -> Parts:
    """Bytes of the weights around the transformer, in the dtypes of this engine, before any is rounded further."""
    parts = parts_of(options.checkpoint)  # counted at two bytes
    wide = options.dtype.itemsize
    return replace(
        parts,
        language=parts.language * wide // 2,
        language_layer=parts.language_layer * wide // 2,
        vae=parts.vae * options.vae_dtype.itemsize // 2,
    )


def setting_of(options: Options) -> Setting:
    """How an engine runs, as the prediction of its memory wants it told."""
    return Setting(
        itemsize=options.dtype.itemsize,
        precision=options.precision,
        text_precision=options.text_precision,
        modulation=options.modulation,
        modulation_itemsize=modulation_itemsize(options.checkpoint),
        fused=runs_kernels(options.device) and options.dtype.itemsize == 2,
        offload=options.offload,
        **vars(options.layout),
    )


def size_of(resolved: ResolvedRequest, clips: int, tail: bool) -> Size:
    """What a request computes on, with as many text tokens as it may have."""
    return Size(
        T=resolved.T + tail,
        Y=resolved.Y,
        X=resolved.X,
        A=resolved.A,
        L=resolved.request.max_text_tokens,
        batch=clips,
        lanes=1 + resolved.guided,
        steps=resolved.steps,
    )


def decode_for(resolved: ResolvedRequest, most: int | None, cost: TileCost) -> Decode:
    """What decoding a request takes, within a budget and never more than `most`."""

    def decode(budget: int | None) -> int:
        limit = min((limit for limit in (budget, most) if limit is not None), default=None)
        return decode_peak(resolved.T, resolved.Y, resolved.X, limit, cost)

    return decode


def settled(options: Options, offload: Offload | None) -> Options:
    """Options with their offload: what is asked for, or by default the first mode with which a clip of the checkpoint's
    own size fits `options.memory`. Blocks come and go without their modulation weights, so `block` takes tables.

    Raises `RequestError` for a mode that the layout cannot have, or weights that find no room in host memory.
    """
    request = ClipRequest("a clip", audio=options.checkpoint.has_audio).resolve(options.checkpoint.defaults)
    size, setting = size_of(request, 1, tail=False), setting_of(options)
    cost = fused_cost() if runs_kernels(options.device) and options.vae_dtype.itemsize == 2 else released_cost()
    decode = decode_for(request, options.decode_budget, cost)
    planner = Planner(options.checkpoint.transformer, parts_held(options))
    if offload is None:
        offload = "none"
        if options.memory is not None:
            able = modes(setting)
            fits = (planner.plan(size, replace(setting, offload=m), decode, options.memory) for m in able)
            plan = next((plan for plan in fits if plan is not None), None)
            offload = able[-1] if plan is None else plan.setting.offload  # a smaller clip may fit yet
    check_offload(offload, options.layout)
    options = replace(options, offload=offload)
    if offload == "block":
        options = replace(options, modulation="tables")
    plan = planner.plan(size, replace(setting_of(options), offload=offload), decode, None)
    assert plan is not None
    need, free = plan.footprint.host * options.layout.world, host_free()
    if offload != "none" and free is not None and need > free:
        told = f"{need / GIB:.1f} GiB of weights would wait in host memory, and {free / GIB:.1f} GiB are free"
        raise RequestError("offload", offload, told)
    return options


@contextmanager
def loading(options: Options, device: torch.device) -> Iterator[None]:
    """Raises `DeviceMemoryError` where the weights find no room, with the offload mode that needs less."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        weights = transformer_weights(options.checkpoint.transformer, setting_of(options)).total
        weights += parts_held(options).in_text_precision(options.text_precision, options.dtype.itemsize).total
        text = f"{device} ran out of memory while weights were loaded: {shown(weights)} is what all of them take"
        able = modes(setting_of(options))
        less = able[able.index(options.offload) + 1 :]
        advice = f"; --offload {less[0]} keeps them in host memory." if less else ", on a device that others use too."
        raise DeviceMemoryError(text + advice) from error


def host_free() -> int | None:
    """Bytes of host memory that are free to use, where the system tells."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    match = re.search(r"MemAvailable:\s*(\d+) kB", text)
    return None if match is None else int(match[1]) * 1024


@dataclass
class Placement:
    """The memory side of an engine on one rank.

    visiting: components whose weights wait in host memory, by the names in `STAGES`; empty without offload, and then
    all is on the device all the time. cost: of decoding. All ranks plan alike, for the first: it holds the most.
    """

    options: Options
    device: torch.device
    planner: Planner
    cost: TileCost
    visiting: Mapping[str, Offloaded] = field(default_factory=dict)
    plan: Plan | None = None
    _asked: tuple[Size, Setting, Decode] | None = None

    @classmethod
    def of(cls, options: Options, device: torch.device, cost: TileCost, visiting: Mapping[str, Offloaded]) -> Placement:
        return cls(options, device, Planner(options.checkpoint.transformer, parts_held(options)), cost, visiting)

    def prepare(self, resolved: ResolvedRequest, clips: int, tail: bool, cache: CachePlan | None = None) -> None:
        """Plan a request; the stages that follow run by that plan.

        Raises `RequestError` where the budget is too small, saying what would do.
        """
        for guest in self.visiting.values():  # brought in ahead for a clip that was stopped
            guest.drop()
        size = size_of(resolved, clips, tail)
        setting = replace(setting_of(self.options), kept=0 if cache is None else cache.kept * size.lanes)
        decode = decode_for(resolved, self.options.decode_budget, self.cost)
        plan = self.planner.plan(size, setting, decode, self.options.memory)
        if plan is None:
            raise self.planner.refusal(size, setting, decode, self.options.memory or 0)
        self.plan, self._asked = plan, (size, setting, decode)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def tiles(self, resolved: ResolvedRequest) -> TilePlan:
        """How the picture is decoded: by shape and budgets alone, so the same on all ranks."""
        limits = [self.options.decode_budget, None if self.plan is None else self.plan.decode]
        budget = min((limit for limit in limits if limit is not None), default=None)
        return plan_tiles(resolved.T, resolved.Y, resolved.X, budget, self.cost)

    def rows(self, tokens: int) -> int | None:
        """Tokens of this rank that the feed-forward computes at once; None: all of them."""
        chunks = 1 if self.plan is None else self.plan.setting.chunks
        return None if chunks == 1 else -(-tokens // chunks)

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        """Have on the device what a stage needs, for as long as it lasts.

        Raises `DeviceMemoryError` where the device has no room for what the stage does.
        """
        guests = [self.visiting[name] for name in STAGES[stage] if name in self.visiting]
        try:
            for name in STAGES[stage]:
                self._load(name)
            yield
        except RuntimeError as error:
            if not ran_out(error):
                raise
            told = self._shortage(stage)
            traceback.clear_frames(error.__traceback__)  # they hold what filled the device
            raise DeviceMemoryError(told) from error
        finally:
            for guest in guests:
                guest.drop()
            if guests and self.device.type == "cuda":
                torch.cuda.empty_cache()

    def ahead(self) -> None:
        """Start bringing in what comes after denoising, if there is room beside it."""
        if self.plan is None or "vae" not in self.visiting:
            return
        phases, coming = self.plan.footprint.phases, ("vae", "sound")
        extra = sum(self.visiting[name].host_bytes for name in coming if name in self.visiting)
        if phases["denoise"].peak + extra <= self._room():
            for name in coming:
                self._load(name, ahead=True)

    def _load(self, name: str, *, ahead: bool = False) -> None:
        guest = self.visiting.get(name)
        if guest is None:
            return
        setting = None if self.plan is None else self.plan.setting
        resident = None
        if setting is not None and name == "transformer" and setting.offload == "block":
            resident = setting.resident
        if setting is not None and name == "language" and setting.language_streamed:
            resident = 0
        guest.load(resident, ahead=ahead)

    def _room(self) -> int:
        if self.options.memory is not None:
            return self.options.memory - slack(self.options.memory)
        if self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).total_memory * 9 // 10
        return 1 << 62

    def report(self) -> dict[str, Any]:
        """What a clip's report tells of memory: how it was placed, and bytes predicted and taken by this rank."""
        assert self.plan is not None
        setting, phases = self.plan.setting, self.plan.footprint.phases
        told: dict[str, Any] = {
            "offload": setting.offload,
            "predicted": {name: phase.peak for name, phase in phases.items()},
        }
        if self.options.memory is not None:
            told["budget"] = self.options.memory
        if setting.offload == "block":
            told["resident_blocks"] = setting.resident
        if setting.chunks > 1:
            told["chunks"] = setting.chunks
        if self.device.type == "cuda":
            told["peak"] = torch.cuda.max_memory_allocated(self.device)
        return told

    def _shortage(self, stage: str) -> str:
        """What was predicted and used, and what needs less."""
        phase = "picture" if stage == "image" else stage
        predicted = self.plan.footprint.phases[phase].peak if self.plan and phase in self.plan.footprint.phases else 0
        text = f"{self.device} ran out of memory in stage {stage}: {shown(predicted)} were predicted"
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            used, other = torch.cuda.memory_allocated(self.device), total - free
            other -= torch.cuda.memory_reserved(self.device)
            text += f", {used / GIB:.1f} of {total / GIB:.1f} GiB were in use here"
            if other > GIB:
                text += f" and {other / GIB:.1f} GiB by others"
        return f"{text}. {self._advice()}"

    def _advice(self) -> str:
        """The nearest setting that fits what this process may have."""
        assert self._asked is not None
        size, setting, decode = self._asked
        room = self._room()
        if self.device.type == "cuda":
            room = torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
        too_much = self.plan is not None and self.plan.footprint.peak > room
        able = modes(setting)
        for mode in able[able.index(setting.offload) + (not too_much) :] or able[-1:]:
            least = self.planner.least(size, replace(setting, offload=mode), decode)
            if least <= room and least < (self.options.memory or room):
                return f"--offload {mode} --memory {shown(least).replace(' ', '')} would fit."
        return f"The least that would do is {shown(least)} with --offload {mode}; or ask for a smaller clip."
