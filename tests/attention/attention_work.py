"""What the ranks do in the tests of unified attention: make the same tensors everywhere, take their part, attend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from diptych.attention import Joint, LocalAttend, PatchCache, Place, Plan, Role, Traffic, unified_attention
from diptych.attention import merge as merging
from diptych.attention.plan import spans
from diptych.errors import LayoutError


@dataclass(frozen=True)
class Case:
    """One attention: R x U ranks that hold `lengths` tokens, and what else there is to it.

    mask: keys that may be seen, one row a batch entry, over the sequence; joint_mask: over the joint tokens.
    """

    ring: int
    ulysses: int
    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 4
    batch: int = 1
    head_dim: int = 8
    dtype: torch.dtype = torch.float32
    joint: int = 0
    where: str | None = None
    mask: tuple[tuple[bool, ...], ...] | None = None
    joint_mask: tuple[tuple[bool, ...], ...] | None = None
    patches: tuple[tuple[int, ...], ...] = ()
    exchange: str = "packed"
    seed: int = 0

    @property
    def world(self) -> int:
        return self.ring * self.ulysses

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass
class Whole:
    """The tensors of a case as one process has them: q, k, v over the sequence; joint q, k, v; masks."""

    q: Tensor
    k: Tensor
    v: Tensor
    joint_q: Tensor
    joint_k: Tensor
    joint_v: Tensor
    mask: Tensor | None
    joint_mask: Tensor | None

    def joined(self, case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, v and mask with the joint tokens where they belong."""
        if case.where is None:
            return self.q, self.k, self.v, self.mask

        def join(joint: Tensor, sequence: Tensor) -> Tensor:
            return torch.cat([joint, sequence] if case.where == "front" else [sequence, joint], 1)

        mask = None
        if self.mask is not None or self.joint_mask is not None:
            ones = torch.ones(case.batch, case.tokens + case.joint, dtype=torch.bool)
            sequence = ones[:, : case.tokens] if self.mask is None else self.mask
            mask = join(ones[:, : case.joint] if self.joint_mask is None else self.joint_mask, sequence)
        return join(self.joint_q, self.q), join(self.joint_k, self.k), join(self.joint_v, self.v), mask


def whole(case: Case, seed: int = 0) -> Whole:
    generator = torch.Generator().manual_seed(case.seed * 1000 + seed)

    def draw(tokens: int, heads: int) -> Tensor:
        return torch.randn(case.batch, tokens, heads, case.head_dim, generator=generator).to(case.dtype)

    sequence = [draw(case.tokens, heads) for heads in (case.heads, case.kv_heads, case.kv_heads)]
    joint = [draw(case.joint, heads) for heads in (case.heads, case.kv_heads, case.kv_heads)]
    masks = [
        None if mask is None else torch.tensor(mask, dtype=torch.bool).view(case.batch, -1)
        for mask in (case.mask, case.joint_mask)
    ]
    return Whole(*sequence, *joint, *masks)


_places: dict[Any, Place] = {}


def place_of(ring: int, ulysses: int) -> Place:
    """This rank's place; groups are made once, since making them costs more than a whole case."""
    key = (dist.group.WORLD, ring, ulysses)
    if key not in _places:
        if any(world is not dist.group.WORLD for world, *_ in _places):
            _places.clear()  # they keep groups that were ended, and the threads of these
        _places[key] = Place.from_mesh(init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses")))
    return _places[key]


def own_rows(case: Case, rank: int, patch: int | None = None) -> list[int]:
    """Where a rank's tokens stand in the single-process order: of one patch, or of all."""
    rows: list[int] = []
    start = 0
    for p, lengths in enumerate(case.patches or (case.lengths,)):
        span = spans(lengths)[rank]
        if patch in (None, p):
            rows += range(start + span.start, start + span.stop)
        start += sum(lengths)
    return rows


def plan_of(case: Case) -> Plan:
    place = place_of(case.ring, case.ulysses)
    return Plan.patched(place, case.patches) if case.patches else Plan(place, case.lengths)


def joint_of(case: Case, tensors: Whole) -> Joint | None:
    if case.where is None:
        return None
    return Joint(tensors.joint_q, tensors.joint_k, tensors.joint_v, case.where, tensors.joint_mask)


def attend(case: Case, return_lse: bool = True) -> dict[str, Any]:
    """Attention of one case on this rank, the bytes it sent, and whether it has the bits of one process."""
    tensors, plan = whole(case), plan_of(case)
    rows = own_rows(case, plan.place.rank)
    q, k, v = (x[:, rows] for x in (tensors.q, tensors.k, tensors.v))
    given: Any = (q, k, v) if case.exchange == "packed" else (lambda: q, lambda: k, lambda: v)
    with Traffic() as traffic:
        attended = unified_attention(
            *given,
            plan,
            joint=joint_of(case, tensors),
            key_mask_BS=tensors.mask,
            cache=PatchCache() if case.patches else None,
            exchange=case.exchange,
            heads=(case.heads, case.kv_heads),
            return_lse=return_lse,
        )
    local = LocalAttend()(Role.VISUAL_SELF, *tensors.joined(case))
    local_joint, local = split_joint(case, local)
    same = torch.equal(attended.out_BsHK, local[:, rows])
    if attended.joint_BJHK is not None:
        same = same and torch.equal(attended.joint_BJHK, local_joint)
    return {
        "out": attended.out_BsHK,
        "lse": attended.lse_BsH,
        "joint": attended.joint_BJHK,
        "joint_lse": attended.joint_lse_BJH,
        "bits of one process": same,
        "sent": traffic.sent,
    }


def attend_with_merge_kernel(case: Case) -> dict[str, Any]:
    """As `attend`, with partial results merged by the Triton kernel, and how many of them."""
    from diptych.attention import merge_kernel  # where ranks need it: it imports Triton

    with (
        mock.patch.object(merging, "fusible", return_value=True),
        mock.patch.object(merge_kernel, "added", wraps=merge_kernel.added) as added,
    ):
        return attend(case) | {"merged by the kernel": added.call_count}


def split_joint(case: Case, x: Tensor) -> tuple[Tensor, Tensor]:
    """Joint rows and sequence rows of a result over both."""
    if case.where is None:
        return x[:, :0], x
    if case.where == "front":
        return x[:, : case.joint], x[:, case.joint :]
    return x[:, case.tokens :], x[:, : case.tokens]


def pipelined_step(case: Case) -> list[dict[str, Any]]:
    """A warm-up over the whole sequence, then one step, patch by patch, with new tensors: this rank's results."""
    plan, cache = plan_of(case), PatchCache()
    warm, fresh = whole(case), whole(case, seed=1)
    rows = own_rows(case, plan.place.rank)
    first = unified_attention(
        *(x[:, rows] for x in (warm.q, warm.k, warm.v)),
        plan,
        cache=cache,
        joint=joint_of(case, warm),
        key_mask_BS=warm.mask,
    )
    results = [{"out": first.out_BsHK, "joint": first.joint_BJHK}]
    for patch in range(len(case.patches)):
        rows = own_rows(case, plan.place.rank, patch)
        attended = unified_attention(
            *(x[:, rows] for x in (fresh.q, fresh.k, fresh.v)),
            plan,
            cache=cache,
            patch=patch,
            joint=joint_of(case, fresh),
            key_mask_BS=fresh.mask,
        )
        results.append({"out": attended.out_BsHK, "joint": attended.joint_BJHK})
    return results


def compiled(case: Case, backend: str = "aot_eager") -> dict[str, Any]:
    """One case as `torch.compile(fullgraph=True)` runs it: graphs, breaks, collectives in them, distance from eager."""
    tensors, plan = whole(case), plan_of(case)
    rows = own_rows(case, plan.place.rank)
    q, k, v = (x[:, rows] for x in (tensors.q, tensors.k, tensors.v))

    def run(q: Tensor, k: Tensor, v: Tensor, joint: Joint | None, mask: Tensor | None, cache: PatchCache | None) -> Any:
        return unified_attention(
            q, k, v, plan, joint=joint, key_mask_BS=mask, cache=cache, exchange=case.exchange, return_lse=True
        )

    def caches() -> PatchCache | None:
        return PatchCache() if case.patches else None

    return _compare(run, (q, k, v, joint_of(case, tensors), tensors.mask), caches, backend)


def _compare(run: Any, args: tuple[Any, ...], caches: Any, backend: str) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    eager = run(*args, caches())
    got = torch.compile(run, fullgraph=True, backend=backend)(*args, caches())
    pairs = [(a, b) for a, b in zip(got, eager, strict=True) if b is not None and b.numel()]
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "error": max((float((a - b).abs().max()) for a, b in pairs), default=0.0),
    }


def order_in_graph(case: Case) -> list[str]:
    """Transfers and attention in the order of the compiled graph: `start`, `attend`, `wait`."""
    tensors, plan = whole(case), plan_of(case)
    rows = own_rows(case, plan.place.rank)
    order: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        for node in graph.graph.nodes:
            name = str(node.target)
            if "wait_tensor" in name:
                order.append("wait")
            elif "all_to_all" in name:
                order.append("start")
            elif "flash_attention" in name:
                order.append("attend")
        return graph.forward

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return unified_attention(q, k, v, plan)

    torch._dynamo.reset()
    torch.compile(run, fullgraph=True, backend=backend)(*(x[:, rows] for x in (tensors.q, tensors.k, tensors.v)))
    return order


def compiled_patch(case: Case) -> dict[str, Any]:
    """As `compiled`, for one patch of a pipelined step."""
    plan = plan_of(case)
    warm, fresh = whole(case), whole(case, seed=1)
    rows = own_rows(case, plan.place.rank)
    patch_rows = own_rows(case, plan.place.rank, 0)

    def run(q: Tensor, k: Tensor, v: Tensor, cache: PatchCache) -> Any:
        return unified_attention(q, k, v, plan, cache=cache, patch=0, return_lse=True)

    def warmed() -> PatchCache:
        cache = PatchCache()
        unified_attention(*(x[:, rows] for x in (warm.q, warm.k, warm.v)), plan, cache=cache)
        return cache

    return _compare(run, tuple(x[:, patch_rows] for x in (fresh.q, fresh.k, fresh.v)), warmed, "aot_eager")


def events(case: Case) -> list[str]:
    """What happens on this rank, in order: `start` and `wait` of transfers, `attend`, and making of q, k, v."""
    tensors, plan = whole(case), plan_of(case)
    rows = own_rows(case, plan.place.rank)
    recorder = Recorder()

    def maker(name: str, x: Tensor) -> Any:
        def make() -> Tensor:
            recorder.events.append(f"make {name}")
            return x[:, rows]

        return make

    with recorder:
        unified_attention(
            maker("q", tensors.q),
            maker("k", tensors.k),
            maker("v", tensors.v),
            plan,
            heads=(case.heads, case.kv_heads),
            exchange=case.exchange,
        )
    return recorder.events


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional":
            self.events.append("wait" if "wait_tensor" in func.name() else "start")
        elif "flash_attention" in func.name():
            self.events.append("attend")
        return func(*args, **(kwargs or {}))


def place_from_groups(ring: int, ulysses: int) -> bool:
    """Whether explicit process groups give the place that a mesh gives."""
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    place = Place.from_groups(ring=mesh.get_group("ring"), ulysses=mesh.get_group("ulysses"), sequence=dist.group.WORLD)
    expected = Place.from_mesh(mesh)
    same = (place.ring, place.ulysses, place.rank) == (expected.ring, expected.ulysses, expected.rank)
    assert place.sequence is not None
    assert expected.sequence is not None
    return same and place.sequence[1:] == expected.sequence[1:] and place.rank == dist.get_rank()


def wrong_groups() -> str:
    """The sentence for ranks numbered ulysses-major."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    try:
        Place.from_groups(ring=mesh.get_group("ulysses"), ulysses=mesh.get_group("ring"), sequence=dist.group.WORLD)
    except LayoutError as error:
        return str(error)
    return ""
