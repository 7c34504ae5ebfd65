"""How one rank shares a clip with the others, as the denoiser wants it told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from diptych.attention import LocalAttend, Role
from diptych.parallel import GuidancePair, Layout, SequenceAttend, TokenShard
from diptych.parallel.agreement import Agreement
from diptych.parallel.deal import Deal
from diptych.parallel.patches import PatchAttend, PatchShard
from diptych.parallel.stages import Stages
from diptych.sampling.denoiser import Combine, combine_serial
from diptych.sampling.forward import Shard
from diptych.sampling.latents import Latents
from diptych.sampling.pipefusion import PipeFusion, PipeSettings


@dataclass(frozen=True)
class Sharing:
    """split: for a number of video tokens, who attends and who holds which tokens (None: all here). Every kind of
    `Attend` here has an `exact` form.

    pipe: for the patches that `split` made, the pipeline of one request; None where no blocks are elsewhere.
    combine: how the lanes of guidance are run and put together.
    agreement: how all ranks come to the same decision.
    deal: which rank encodes and decodes what.
    """

    split: Callable[[int], tuple[LocalAttend | SequenceAttend | PatchAttend, Shard | None]]
    combine: Combine
    agreement: Agreement = field(default_factory=Agreement)
    deal: Deal = field(default_factory=Deal)
    pipe: Callable[[Shard | None], PipeFusion] | None = None


def alone(kernels: Mapping[Role, str] | None = None) -> Sharing:
    """One rank: everything is here. kernels: attention kernels asked for by role."""
    attend = LocalAttend(kernels or {})
    return Sharing(lambda tokens: (attend, None), combine_serial)


def sharing_for(
    layout: Layout,
    device: torch.device,
    kernels: Mapping[Role, str] | None = None,
    pipe: PipeSettings | None = None,
) -> Sharing:
    """This rank's part in a layout. All ranks of the process group call it together.

    kernels: as for `alone`. pipe: how patches pass through a layout with several pipeline stages.
    """
    mesh = layout.mesh(device.type)
    pair = GuidancePair(mesh)
    stages = Stages.from_mesh(mesh)

    def split(tokens: int) -> tuple[LocalAttend | SequenceAttend | PatchAttend, Shard | None]:
        if pipe is not None:
            patches = PatchShard(tokens, pipe.patches, mesh)
            return PatchAttend(patches, kernel=kernels or {}), patches
        if layout.sequence == 1:
            return LocalAttend(kernels or {}), None
        shard = TokenShard(tokens, mesh)
        return SequenceAttend(shard, kernel=kernels or {}), shard

    def combine(lanes: Sequence[Callable[[], Latents]], guidance: float) -> Latents:
        if len(lanes) == 1:  # guidance is off: both halves compute the same
            return lanes[0]()
        video, audio = lanes[pair.lane]()
        guided = pair.combine([video] if audio is None else [video, audio], guidance)
        return Latents(guided[0], None if audio is None else guided[1])

    def pipeline(shard: Shard | None) -> PipeFusion:
        assert pipe is not None and isinstance(shard, PatchShard)
        return PipeFusion(stages, shard, pipe, together=not pair.split)

    return Sharing(
        split,
        combine if pair.split else combine_serial,
        Agreement.of_all_ranks(),
        Deal.to_all_ranks(),
        None if pipe is None else pipeline,
    )
