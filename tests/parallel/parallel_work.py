"""What the ranks do in the tests of layouts, shards, roles and guidance."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from diptych.attention import Place, Role, Traffic
from diptych.errors import LayoutError
from diptych.parallel import GuidancePair, Layout, SequenceAttend, TokenShard

_meshes: dict[Any, Any] = {}


def mesh_of(layout: Layout) -> Any:
    key = (dist.group.WORLD, layout)
    if key not in _meshes:
        _meshes[key] = layout.mesh("cpu")
    return _meshes[key]


def mesh_error(layout: Layout) -> str:
    try:
        layout.mesh("cpu")
    except LayoutError as error:
        return str(error)
    return ""


def coordinates(layout: Layout) -> tuple[int, int, int, int]:
    mesh = mesh_of(layout)
    place = Place.from_mesh(mesh)
    assert place.sequence is not None
    return mesh.get_local_rank("cfg"), place.ring.rank, place.ulysses.rank, place.sequence.rank


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def shard_and_back(layout: Layout, tokens: int) -> dict[str, Any]:
    shard = TokenShard(tokens, mesh_of(layout))
    x_BSD, rope_SK = draw(0, 2, tokens, 3), draw(1, tokens, 1, 4)
    own = shard.scatter(x_BSD)
    with Traffic() as traffic:
        back = shard.gather(own * 2)
    return {
        "own": own,
        "rope": shard.scatter(rope_SK, 0),
        "lengths": shard.plan.lengths,
        "whole again": torch.equal(back, x_BSD * 2),
        "sent": traffic.sent,
    }


VIDEO_HEADS, AUDIO_HEADS, HEAD_DIM = 5, 3, 8


def role_tensors(
    role: Role, tokens: int, audio: int, dtype: torch.dtype, text: int = 4
) -> tuple[tuple[Tensor, bool], tuple[Tensor, bool], tuple[Tensor, bool]]:
    """q, k, v of a role as one process has them, each with whether its tokens are split."""
    video_queries = role in (Role.VISUAL_SELF, Role.VISUAL_TEXT, Role.VIDEO_FROM_AUDIO)
    heads = VIDEO_HEADS if video_queries else AUDIO_HEADS
    video_keys = role in (Role.VISUAL_SELF, Role.AUDIO_FROM_VIDEO)
    queries = tokens if video_queries else text if role is Role.TEXT_SELF else audio
    audio_keys = role in (Role.AUDIO_SELF, Role.VIDEO_FROM_AUDIO)
    keys = tokens if video_keys else audio if audio_keys else text
    q = draw(2, 2, queries, heads, HEAD_DIM, dtype=dtype)
    k, v = (draw(seed, 2, keys, heads, HEAD_DIM, dtype=dtype) for seed in (3, 4))
    return (q, video_queries), (k, video_keys), (v, video_keys)


def attend_role(
    layout: Layout, role: Role, tokens: int, audio: int, dtype: torch.dtype, mask: Tensor | None = None
) -> dict[str, Any]:
    shard = TokenShard(tokens, mesh_of(layout))
    attend = SequenceAttend(shard)
    q, k, v = (shard.scatter(x) if split else x for x, split in role_tensors(role, tokens, audio, dtype))
    with Traffic() as traffic:
        out = attend(role, q, k, v, mask)
    return {"out": out, "sent": traffic.sent}


def compiled_role(layout: Layout, role: Role, tokens: int, audio: int, dtype: torch.dtype) -> tuple[int, int, float]:
    from torch._dynamo.utils import counters

    shard = TokenShard(tokens, mesh_of(layout))
    attend = SequenceAttend(shard)
    q, k, v = (shard.scatter(x) if split else x for x, split in role_tensors(role, tokens, audio, dtype))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(role, q, k, v)

    torch._dynamo.reset()
    counters.clear()
    got = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)
    breaks = sum(counters["graph_break"].values())
    return counters["stats"]["unique_graphs"], breaks, float((got - run(q, k, v)).abs().max())


def exchange_velocities(layout: Layout, dtype: torch.dtype, guidance: float) -> dict[str, Any]:
    pair = GuidancePair(mesh_of(layout))
    own = [draw(10 * pair.lane + i, 2, n, 3, dtype=dtype) for i, n in enumerate((7, 5))]
    with Traffic() as traffic:
        combined = pair.combine(own, guidance)
    return {"lane": pair.lane, "combined": combined, "sent": traffic.sent}
