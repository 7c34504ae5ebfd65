"""Imitation distillation for PiFlow heads (pi-Flow, arXiv 2510.14974), on the policy's own path.

The student is asked once, at the start of a segment, and its ten predictions make a policy that needs no network. The
policy is rolled out to random substeps; at the latents that it reaches, not on any path of the teacher's, its velocity
is to be the guided teacher's. The latents reached are taken as given: gradients come through the velocity alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diptych.parallel.guidance import guided
from diptych.sampling.schedules import PiFlowSchedule
from tools.toyworld.fast_flow import velocity
from tools.toyworld.flow import AUDIO_SHARE, clean, first_frames, model_inputs
from tools.toyworld.pool import Features, Latents


class Policy:
    """Every segment's rollout as tables on one device, so that each clip of a batch can be in a segment of its own.

    segment, at (B,): which segment, and which of its substeps.
    """

    def __init__(self, schedule: PiFlowSchedule, place: torch.device) -> None:
        rollouts = [schedule.rollout(index) for index in range(schedule.steps)]
        most = max(map(len, rollouts))
        rows = [r + r[-1:] * (most - len(r)) for r in rollouts]

        def table(name: str) -> Tensor:
            return torch.tensor([[getattr(s, name).tolist() for s in row] for row in rows], device=place)

        self.segments, self.grid = schedule.steps, schedule.n_grid
        self.substeps = torch.tensor([len(r) - 1 for r in rollouts], device=place)
        self._sigma = torch.tensor([[s.sigma for s in row] for row in rows], device=place)
        self._passed, self._here = table("passed"), table("here")

    def draw(self, segment: Tensor) -> Tensor:
        """A substep for each, every one as likely, of those at which sampling asks the policy: the end is none."""
        count = self.substeps[segment]
        return (torch.rand(len(segment), device=segment.device) * count).long().minimum(count - 1)

    def sigma(self, segment: Tensor, at: Tensor | int = 0) -> Tensor:
        """Noise levels (B,)."""
        return self._sigma[segment, at]

    def reached(self, x: Tensor, u: Tensor, segment: Tensor, at: Tensor) -> Tensor:
        """The rollout's latents at a substep, given latents x (B, ..., C) at the segment's start and predictions u
        (B, ..., grid, C) made there."""
        return x - _wide(self.sigma(segment), x) * _mixed(u, self._passed[segment, at])

    def velocity(self, x: Tensor, u: Tensor, segment: Tensor, at: Tensor, here: Tensor) -> Tensor:
        """What the policy of (x, u) moves by at the latents `here` of a substep."""
        data = x - _wide(self.sigma(segment), x) * _mixed(u, self._here[segment, at])
        return (here - data) / _wide(self.sigma(segment, at), x)


def _wide(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *[1] * (x.ndim - 1))


def _mixed(u: Tensor, weights_BK: Tensor) -> Tensor:
    return (u * weights_BK.view(len(u), *[1] * (u.ndim - 3), -1, 1)).sum(-2)


@dataclass
class Start:
    """Latents at the starts of segments: clips `index` of the pool, at the noise level of `segment`.

    streams: video (B, T, Y, X, C) and, where there is sound, audio (B, A, C). tail (B, Y, X, C): the reference frame.
    """

    index: Tensor
    segment: Tensor
    streams: list[Tensor]
    tail: Tensor | None

    def join(self, other: Start) -> Start:
        """Both batches as one."""
        assert (self.tail is None) == (other.tail is None)
        return Start(
            torch.cat([self.index, other.index]),
            torch.cat([self.segment, other.segment]),
            [torch.cat(pair) for pair in zip(self.streams, other.streams, strict=True)],
            None if self.tail is None or other.tail is None else torch.cat([self.tail, other.tail]),
        )


def noised(data: Latents, policy: Policy, kind: str, index: Tensor) -> Start:
    """Clips of the pool with noise added, each at the start of a random segment."""
    segment = torch.randint(policy.segments, index.shape, device=index.device)
    sigma = policy.sigma(segment)
    streams = [x + _wide(sigma, x) * (torch.randn_like(x) - x) for x in clean(data, kind, index)]
    tail = first_frames(data, index) if kind == "image" else None
    return Start(index, segment, streams[:1] if kind == "mute" else streams, tail)


class Own:
    """Clips that the student itself is denoising, a segment at every step: what it will meet when it samples.

    A finished one makes room for fresh noise and another caption. They begin as noised clips in every segment.
    """

    def __init__(self, data: Latents, policy: Policy, kind: str, count: int) -> None:
        self._data, self._policy = data, policy
        place = data.video.device
        self.now = noised(data, policy, kind, torch.randint(len(data.video), (count,), device=place))

    @torch.no_grad()
    def advance(self, ends: list[Tensor]) -> None:
        """Take the ends of all segments as the starts of the next, in place: a recorded step reads and writes here."""
        now, done = self.now, self.now.segment == self._policy.segments - 1
        now.index.copy_(torch.where(done, torch.randint_like(now.index, len(self._data.video)), now.index))
        now.segment.copy_((now.segment + 1) % self._policy.segments)
        for held, end in zip(now.streams, ends, strict=True):
            held.copy_(torch.where(_wide(done, held), torch.randn_like(held), end))
        if now.tail is not None:
            now.tail.copy_(torch.where(_wide(done, now.tail), first_frames(self._data, now.index), now.tail))


@dataclass
class Imitation:
    """What every step shares. guidance: the teacher's; states: substeps at which each policy is held to it."""

    student: nn.Module
    teacher: nn.Module
    data: Latents
    text: Features
    none: Features
    policy: Policy
    guidance: float
    states: int = 2
    dtype: torch.dtype = torch.bfloat16
    fused: bool = False

    def predictions(self, start: Start) -> list[Tensor]:
        """The student's, float32, of each stream: (B, ..., grid, C), from one forward without guidance."""
        sigma = self.policy.sigma(start.segment)
        out = self._velocity(self.student, start.streams, self.text.rows(start.index), sigma, start.tail)
        return [u.unflatten(-1, (self.policy.grid, -1)) for u in out]

    @torch.no_grad()
    def target(self, start: Start, reached: list[Tensor], at: Tensor) -> list[Tensor]:
        """The teacher's guided velocities, float32, of the latents that a batch has reached; both lanes at once."""
        mine, none = self.text.rows(start.index), self.none
        lanes = Features(
            torch.cat([mine.hidden, none.hidden.expand_as(mine.hidden)]),
            torch.cat([mine.mask, none.mask.expand_as(mine.mask)]),
            torch.cat([mine.pooled, none.pooled.expand_as(mine.pooled)]),
        )
        sigma = self.policy.sigma(start.segment, at).repeat(2)
        tail = None if start.tail is None else torch.cat([start.tail] * 2)
        out = self._velocity(self.teacher, [torch.cat([x, x]) for x in reached], lanes, sigma, tail)
        return [guided(*v.chunk(2), self.guidance) for v in out]

    def _velocity(
        self, model: nn.Module, streams: list[Tensor], text: Features, sigma: Tensor, tail: Tensor | None
    ) -> list[Tensor]:
        video, audio = streams if len(streams) == 2 else (streams[0], None)
        out, sound = velocity(model, model_inputs(video, audio, text, sigma, tail), self.dtype, self.fused)
        return [v.float() for v in (out[:, : video.shape[1]], sound) if v is not None]

    def loss(self, kind: str, index: Tensor, own: Own | None = None) -> dict[str, Tensor]:
        """Mean squared difference of the velocities, for the clips `index` of the pool and those of `own`, which move
        on by a segment."""
        policy, start = self.policy, noised(self.data, self.policy, kind, index)
        if own is not None:
            start = start.join(own.now)
        predicted = self.predictions(start)

        def reached(at: Tensor) -> list[Tensor]:
            pairs = zip(start.streams, predicted, strict=True)
            return [policy.reached(x, u.detach(), start.segment, at) for x, u in pairs]

        losses: list[Tensor] = []
        for _ in range(self.states):
            at = policy.draw(start.segment)
            here = reached(at)
            rows = zip(start.streams, predicted, here, self.target(start, here, at), strict=True)
            errors = [policy.velocity(x, u, start.segment, at, now) - v for x, u, now, v in rows]
            losses.append(torch.stack([e.square().mean() for e in errors]))
        if own is not None:
            own.advance([end[len(index) :] for end in reached(policy.substeps[start.segment])])
        values = dict(zip(("video", "audio"), torch.stack(losses).mean(0), strict=False))
        values["total"] = values["video"] + AUDIO_SHARE * values["audio"] if "audio" in values else values["video"]
        return values
