"""How a clip is made within so many bytes of device memory: what stays, what streams, what runs in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from diptych.errors import RequestError
from diptych.memory.footprint import GIB, MIB, SLOTS, Footprint, Offload, Parts, Setting, Size, footprint
from diptych.model.config import TransformerConfig

OFFLOADS: tuple[Offload, ...] = ("none", "model", "block")
"""The one that needs most first."""
CHUNKS = (1, 2, 4, 8, 16, 32)

Decode = Callable[[int | None], int]
"""Peak bytes of decoding the picture within a budget (None: as it is done by default), or the least that would do."""


def modes(setting: Setting) -> tuple[Offload, ...]:
    """Those of `OFFLOADS` that ranks of `setting` can have: a share of the weights has no other place, and blocks that
    stream would come once for every patch of a pipeline."""
    return OFFLOADS[:1] if setting.shard > 1 else OFFLOADS[:2] if setting.pipeline > 1 else OFFLOADS


@dataclass(frozen=True)
class Plan:
    """How a clip is made, and what that is predicted to take. decode: what decoding may take; None: no limit."""

    setting: Setting
    footprint: Footprint
    decode: int | None


@dataclass(frozen=True)
class Planner:
    """Plans for one checkpoint on one rank. decode: how much decoding takes, by budget; parts: as for `footprint`."""

    config: TransformerConfig
    parts: Parts
    first: bool = True

    def plan(self, size: Size, setting: Setting, decode: Decode, budget: int | None) -> Plan | None:
        """The plan for `setting.offload` that fits `budget` (bytes; None: no limit), or None.

        With a budget as many blocks stay as it has room for, the feed-forward runs in as few parts as fit, and the
        language model streams only where it does not fit whole. Without one, `block` keeps nothing that can stream.
        """
        if budget is None:
            chosen = replace(setting, language_streamed=setting.offload == "block")
            return Plan(chosen, self._bytes(size, chosen, decode(None)), None)
        room = budget - slack(budget)
        for chunks in (n for n in CHUNKS if n >= setting.chunks):
            chosen = replace(setting, chunks=chunks)
            if self._bytes(size, chosen, 0).phases["denoise"].peak <= room:
                break
        else:
            return None
        if setting.offload == "block":
            chosen = self._keep(size, chosen, room)
        if self.first and setting.offload != "none" and self._bytes(size, chosen, 0).phases["text"].peak > room:
            chosen = replace(chosen, language_streamed=True)
        before = self._bytes(size, chosen, 0).phases
        for_decode = room - before["picture"].weights
        predicted = self._bytes(size, chosen, decode(for_decode))
        return Plan(chosen, predicted, for_decode) if predicted.peak <= room else None

    def least(self, size: Size, setting: Setting, decode: Decode) -> int:
        """The smallest budget with which `setting.offload` fits."""
        small = replace(setting, chunks=CHUNKS[-1], resident=0, language_streamed=setting.offload != "none")
        peak = self._bytes(size, small, decode(0)).peak
        return next(budget for budget in _budgets(peak) if budget - slack(budget) >= peak)

    def _bytes(self, size: Size, setting: Setting, decode: int) -> Footprint:
        return footprint(self.config, size, setting, decode=decode, parts=self.parts, first=self.first)

    def _keep(self, size: Size, setting: Setting, room: int) -> Setting:
        """With as many blocks resident as there is room for."""
        blocks = self.config.num_visual_blocks
        for resident in range(max(blocks - SLOTS, 0), 0, -1):
            kept = replace(setting, resident=resident)
            if self._bytes(size, kept, 0).phases["denoise"].peak <= room:
                return kept
        return setting

    def choose(self, size: Size, setting: Setting, decode: Decode, budget: int | None) -> Plan:
        """The plan for the first offload mode that fits, in the order none, model, block. Raises `RequestError`."""
        plans = (self.plan(size, replace(setting, offload=mode), decode, budget) for mode in modes(setting))
        found = next((plan for plan in plans if plan is not None), None)
        if found is None:
            raise self.refusal(size, setting, decode, budget or 0)
        return found

    def refusal(self, size: Size, setting: Setting, decode: Decode, budget: int) -> RequestError:
        """That `budget` is too small with `setting.offload`, and what would do."""
        needs = {mode: self.least(size, replace(setting, offload=mode), decode) for mode in modes(setting)}
        own = needs[setting.offload]
        clip = f"{size.X * 8}x{size.Y * 8} in {4 * (size.T - 1) + 1} frames"
        sentence = f"{clip} takes at least {shown(own)} with offload {setting.offload}"
        fitting = next((mode for mode in needs if needs[mode] <= budget), None)
        smallest = min(needs, key=lambda mode: needs[mode])
        if fitting is not None:
            sentence += f"; --offload {fitting} fits"
        elif needs[smallest] < own:
            sentence += f", and {shown(needs[smallest])} with --offload {smallest}"
        else:
            sentence += "; ask for a smaller or shorter clip"
        return RequestError("memory", written(budget), sentence)


def slack(budget: int) -> int:
    """What the allocator may lose between pieces that do not fill their places."""
    return min(256 * MIB, budget // 50)


def shown(nbytes: int) -> str:
    """As a person says it: GiB to a tenth, or whole MiB; below one the bytes."""
    if nbytes < MIB:
        return f"{nbytes} B"
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.0f} MiB"


def written(nbytes: int) -> str:
    """As a person types it, to four digits, so that it is told from what is almost as much."""
    size, unit = next(((size, unit) for size, unit in ((GIB, "GiB"), (MIB, "MiB")) if nbytes >= size), (1, "B"))
    return f"{nbytes / size:.4g}{unit}" if size > 1 else f"{nbytes}B"


def _budgets(peak: int) -> Iterator[int]:
    """Budgets from `peak` on, in steps of a tenth of a GiB, or of a MiB below one."""
    step = GIB // 10 if peak >= GIB else MIB
    budget = -(-peak // step) * step
    while True:
        yield budget
        budget += step
