"""PipeFusion: the blocks lie on several ranks, and patches of the video tokens follow each other through them.

The sound travels with every patch: it is 0.4 % of the tokens, every patch then hears this step's sound, and what counts
in the end is the pass with the last patch, for which all keys are this step's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from diptych.errors import RequestError
from diptych.model.ops import Rope
from diptych.model.transformer import Streams
from diptych.parallel.patches import BlockCaches, PatchAttend, PatchShard
from diptych.parallel.stages import Stages, stage_blocks
from diptych.sampling.forward import Forward
from diptych.sampling.latents import Latents

MOST_STEPS, MOST_PATCHES = 1000, 64


@dataclass(frozen=True)
class PipeSettings:
    """warmup: first steps that are computed exactly; one at least. patches: how many the tokens are cut into.

    An approximation from step `warmup` on: patches not yet computed are seen as they were one step before.
    """

    warmup: int
    patches: int

    @classmethod
    def parse(cls, text: str | None, stages: int) -> PipeSettings:
        """Read `WARMUP` or `WARMUP,PATCHES`; by default 2 exact steps and 2 patches a stage. Raises `RequestError`."""
        match = re.fullmatch(r"\s*(\d{1,4})\s*(?:,\s*(\d{1,3})\s*)?", "2" if text is None else str(text), re.ASCII)
        warmup, patches = (0, 0) if match is None else (int(match[1]), int(match[2] or 2 * stages))
        if not (1 <= warmup <= MOST_STEPS and 1 <= patches <= MOST_PATCHES):
            raise RequestError(
                "pipefusion",
                text,
                f"WARMUP or WARMUP,PATCHES, such as 2,8: 1 to {MOST_STEPS} exact steps, 1 to {MOST_PATCHES} patches",
            )
        return cls(warmup, patches)


@dataclass
class PipeFusion:
    """One request's pipeline on this rank. All stages call `lanes` alike, and what it gives.

    together: run both lanes of guidance through the pipeline at once, which leaves it idle less; with `cfg=2` each half
    has one.
    """

    stages: Stages
    shard: PatchShard
    settings: PipeSettings
    together: bool = True
    caches: dict[tuple[int, int], BlockCaches] = field(default_factory=dict)

    def approximate(self, steps: int) -> str | None:
        """What a report of a request with `steps` steps has to say; None where all of them were exact."""
        stale, patches = steps - self.settings.warmup, self.shard.patches
        if stale <= 0 or patches == 1:
            return None
        return (
            f"pipefusion: in {stale} of {steps} steps each of {patches} patches saw those behind it "
            "as they were a step before"
        )

    def lanes(self, forwards: Sequence[Forward]) -> list[Callable[[], Latents]]:
        """For each lane a function that gives its velocity: whole, alike on every rank."""
        if not self.together:
            return [partial(self._only, forward) for forward in forwards]
        made: list[Latents] = []

        def lane(n: int) -> Latents:
            if not made:
                made.extend(self._run(forwards))
            return made[n]

        return [partial(lane, n) for n in range(len(forwards))]

    def _only(self, forward: Forward) -> Latents:
        return self._run([forward])[0]

    def _run(self, forwards: Sequence[Forward]) -> list[Latents]:
        exact = forwards[0].step < self.settings.warmup or self.shard.patches == 1
        patches = [None] if exact else list(range(self.shard.patches))
        streams = [forward.embed() for forward in forwards]
        units = [(lane, patch) for lane in range(len(forwards)) for patch in patches]

        def compute(unit: int, received: list[Tensor] | None) -> list[Tensor]:
            lane, patch = units[unit]
            piece = self._piece(streams[lane], patch, received)
            return self._through(forwards[lane], piece, patch, given=received is not None)

        def shapes(unit: int) -> list[tuple[int, ...]]:
            lane, patch = units[unit]
            video, audio = streams[lane].video, streams[lane].audio
            video_shape = (video.shape[0], self.shard.size(patch), video.shape[2])
            return [video_shape] if audio is None else [video_shape, tuple(audio.shape)]

        made = self.stages.run(len(units), compute, shapes, streams[0].video)
        results = []
        for lane, forward in enumerate(forwards):
            of_lane = made[lane * len(patches) : (lane + 1) * len(patches)]
            results.append(self._velocity(forward, streams[lane], of_lane))
        return results

    def _piece(self, whole: Streams, patch: int | None, received: list[Tensor] | None) -> Streams:
        """A patch with the sound, as it enters this stage."""
        own = self.shard.own(patch)
        cos, sin = whole.rope_video
        if received is not None:
            video, audio = received[0], received[1] if len(received) > 1 else None
        else:
            video, audio = whole.video[:, own].contiguous(), whole.audio
        return replace(whole, video=video, audio=audio, rope_video=Rope(cos[own], sin[own]))

    def _through(self, forward: Forward, piece: Streams, patch: int | None, *, given: bool) -> list[Tensor]:
        """This stage's blocks, and on the last one the heads. given: the piece came from the stage before."""
        for index in stage_blocks(len(forward.model.fused_blocks), self.stages.count, self.stages.stage):
            attend = forward.attend_of(index)
            assert isinstance(attend, PatchAttend)
            caches = self.caches.setdefault((forward.lane, index), BlockCaches())
            piece = forward.model.blocks(piece, attend.of(caches, patch), index, index + 1, own=given)
            given = True
        video, audio = forward.model.head(piece) if self.stages.last else (piece.video, piece.audio)
        return [video] if audio is None else [video, audio]

    def _velocity(self, forward: Forward, streams: Streams, made: list[list[Tensor]]) -> Latents:
        """All patches' velocity tokens, from the last stage to every rank, and from every rank's part to the whole."""
        if self.stages.last:
            out = [torch.cat([of_patch[0] for of_patch in made], 1), *made[-1][1:]]
        else:
            config, dtype = forward.model.config, forward.model.dtype
            B, s, _ = streams.video.shape
            out = [streams.video.new_empty((B, s, 4 * config.out_visual_dim), dtype=dtype)]
            if streams.audio is not None:
                out.append(streams.video.new_empty((B, streams.audio.shape[1], config.out_audio_dim), dtype=dtype))
        video, *audio = self.stages.from_last(out)
        return forward.whole(video, audio[0] if audio else None)
