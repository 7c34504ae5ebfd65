"""Cache-DiT: the dual-block cache (DBCache) of the library cache-dit, on the two streams of the fused block.

The library's blocks take and return `hidden_states` and `encoder_hidden_states` and cache the residual of both: here
those are video and audio. Its decision reads the first of them, so video alone. Bookkeeping, residuals and the Taylor
extrapolation are the library's; the change that it decides on is summed over all ranks that hold video tokens.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor, nn

from diptych.errors import RequestError
from diptych.model.transformer import Streams
from diptych.sampling.caches.base import Run, counts
from diptych.sampling.forward import Forward
from diptych.sampling.latents import Latents


@dataclass(frozen=True)
class CacheDiTSettings:
    """threshold: relative change of what the front blocks add to the video; max_run: steps predicted in a row;
    retention: share of steps computed first; last: steps computed at the end; front, back: blocks that always run;
    order: of the library's Taylor extrapolation, 0 to reuse what was."""

    threshold: float = 0.08
    max_run: int = 3
    retention: float = 0.2
    last: int = 1
    front: int = 1
    back: int = 0
    order: int = 0
    name: ClassVar[str] = "cachedit"
    needs: ClassVar[str] = ""

    def check(self, blocks: int) -> None:
        """Raise `RequestError` without the library, or where nothing is left between the front and back blocks."""
        if find_spec("cache_dit") is None:
            raise RequestError("cache", self.name, "it needs the package cache-dit; pip install 'diptych[cache-dit]'")
        if self.front + self.back >= blocks:
            raise RequestError(
                f"cache {self.name}: front and back",
                f"{self.front} and {self.back}",
                f"together fewer than the {blocks} blocks of this checkpoint",
            )

    def start(self, run: Run) -> CacheDiT:
        return CacheDiT(self, run)


class CacheDiT:
    """Decided on the conditional lane; the other follows.

    A predicted forward runs the text towers, the front and back blocks, and the heads.
    """

    def __init__(self, settings: CacheDiTSettings, run: Run) -> None:
        self.settings, self.run = settings, run
        self._lane, self._asked, self._change = 0, -1, 0.0
        library = _library()
        self._manager = library.CachedContextManager("diptych")
        self._manager.similarity = self._similar
        self._blocks: dict[int, Any] = {}

    def velocity(self, forward: Forward) -> Latents:
        self._lane, before = forward.lane, forward.embed()
        if forward.lane not in self._blocks:
            self._blocks[forward.lane] = self._of_lane(forward)
        video, audio = self._blocks[forward.lane](before.video, before.audio, forward, before)
        return forward.head(replace(before, video=video, audio=audio))

    def _of_lane(self, forward: Forward) -> Any:
        """The library's blocks around the model's, with a context of their own."""
        library, name, s = _library(), f"lane {forward.lane}", self.settings
        first = min(max(int(self.run.steps * s.retention), 1), self.run.steps)
        between = max(self.run.steps - first - s.last, 0)
        config = library.BasicCacheConfig(
            Fn_compute_blocks=s.front,
            Bn_compute_blocks=s.back,
            residual_diff_threshold=s.threshold,
            max_warmup_steps=first,
            max_continuous_cached_steps=s.max_run,
            enable_separate_cfg=False,
            steps_computation_mask=[1] * first + [0] * between + [1] * (self.run.steps - first - between),
        )
        series = library.TaylorSeerCalibratorConfig(taylorseer_order=s.order) if s.order else None
        self._manager.new_context(name=name, cache_config=config, calibrator_config=series)
        return library.CachedBlocks(
            nn.ModuleList(_Block(index) for index in range(len(forward.model.fused_blocks))),
            forward_pattern=library.ForwardPattern.Pattern_0,
            cache_prefix=name,
            cache_context=name,
            context_manager=self._manager,
        )

    def _similar(self, before: Tensor, now: Tensor, *, threshold: float, **_: Any) -> bool:
        """In the place of the library's: both lanes ask it in the same steps, and every rank answers alike."""
        asked = self._manager.current_context
        step = asked.get_current_step()
        if step != self._asked:
            sums = [0.0, 0.0]
            if self._lane == 0:
                change, size = (now.float() - before.float()).abs().sum(), before.float().abs().sum()
                sums = [float(change), float(size)]
            total, of = self.run.agreement.total(sums)
            self._asked, self._change = step, total / of if of else 0.0
        asked.add_residual_diff(self._change)
        return self._change < threshold

    def report(self) -> dict[str, Any]:
        context = next(iter(self._blocks.values())).context_manager.current_context
        cached = set(context.get_cached_steps())
        return counts([[step not in cached for step in range(context.executed_steps)]] * self.run.lanes)


class _Block(nn.Module):
    """One fused block under the names that the library looks for."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor | None, forward: Forward, before: Streams
    ) -> tuple[Tensor, Tensor | None]:
        streams = replace(before, video=hidden_states, audio=encoder_hidden_states)
        after = forward.blocks(streams, self.index, self.index + 1)
        return after.video, after.audio


@cache
def _library() -> SimpleNamespace:
    """What is used of cache-dit, imported when it is asked for: that takes seconds."""
    os.environ.setdefault("CACHE_DIT_LOG_LEVEL", "WARNING")
    from cache_dit import BasicCacheConfig, ForwardPattern, TaylorSeerCalibratorConfig
    from cache_dit.caching.cache_blocks.pattern_0_1_2 import CachedBlocks_Pattern_0_1_2
    from cache_dit.caching.cache_contexts.cache_manager import CachedContextManager

    logging.getLogger("CACHE_DIT").setLevel(logging.WARNING)
    return SimpleNamespace(
        BasicCacheConfig=BasicCacheConfig,
        CachedBlocks=CachedBlocks_Pattern_0_1_2,
        CachedContextManager=CachedContextManager,
        ForwardPattern=ForwardPattern,
        TaylorSeerCalibratorConfig=TaylorSeerCalibratorConfig,
    )
