"""xDiT's unified attention (xfuser's own `USP`) beside ours: one GPU, world 1, the same kernel under both.

    python benchmarks/xdit_attention.py [--tiny] [--out FILE.json]

Needs the packages xfuser, yunchang, einops and diffusers. q, k and v are (1, 14867, 24, 128) in bfloat16; the text has
64 joint tokens behind them. The tensors lie as the projections of a model give them, token by token. xDiT wants heads
first, so it gets transposed views of them, as its users pass; "heads first" is the same call on tensors that lie as its
own test lays them. Times are medians of calls taken in turns.

`--tiny` runs at a toy size on whatever is there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import statistics
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from diptych.attention import Joint, Place, Plan, unified_attention
from diptych.attention.kernels import KERNELS
from diptych.bench.forward import machine
from diptych.bench.timing import alternating

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAIRS = {"flash_3": "fa3", "cudnn": "sdpa-cudnn", "sdpa_flash": "sdpa-flash"} if DEVICE.type == "cuda" else {}
PAIRS = PAIRS or {"sdpa": "sdpa-flash"}
"""xDiT's backend: our kernel that is the same code underneath."""

Pair = tuple[Tensor, Tensor]
"""Output for the picture and for the joint tokens, (B, S, H, K) and (B, J, H, K)."""


def import_usp() -> Any:
    """xfuser's USP, ready at world 1.

    xfuser's own `__init__` imports every pipeline it has, and what those need; the attention needs none of it, so that
    its packages are entered without theirs. FlashAttention-3 has several wheels: xfuser is shown the one that is here.
    """
    for fa3 in ("flash_attn_interface", "fa3_fwd_interface"):
        if importlib.util.find_spec(fa3) is not None:
            sys.modules.setdefault("flash_attn_interface", importlib.import_module(fa3))
            break
    spec = importlib.util.find_spec("xfuser")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("xfuser is not installed: pip install --no-deps xfuser yunchang einops")
    root = Path(spec.submodule_search_locations[0]).parent
    for name in ("xfuser", "xfuser.model_executor", "xfuser.model_executor.layers"):
        package = types.ModuleType(name)
        package.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = package
    if DEVICE.type == "cpu":  # it asks for a GPU by the build of torch, not by what is there
        torch.cuda.set_device = lambda device: None
    from xfuser.core.distributed import init_distributed_environment, initialize_model_parallel
    from xfuser.core.distributed.runtime_state import initialize_runtime_state
    from xfuser.model_executor.layers import usp

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", "29611")
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    init_distributed_environment(rank=0, world_size=1, backend=backend)
    initialize_runtime_state()
    initialize_model_parallel(ring_degree=1, ulysses_degree=1, backend=backend)
    return usp


def xdit(usp: Any, qkv: list[Tensor], joint: list[Tensor]) -> Callable[[], Pair]:
    """qkv, joint: heads first."""
    S = qkv[0].shape[2]

    def call() -> Pair:
        out_BHSK = usp.USP(*qkv, joint_query=joint[0], joint_key=joint[1], joint_value=joint[2], joint_strategy="rear")
        out_BSHK = out_BHSK.transpose(1, 2)
        return out_BSHK[:, :S], out_BSHK[:, S:]

    return call


def ours(kernel: str, qkv: list[Tensor], joint: list[Tensor]) -> Callable[[], Pair]:
    """qkv, joint: tokens first."""
    plan = Plan(Place(), (qkv[0].shape[1],))

    def call() -> Pair:
        attended = unified_attention(*qkv, plan, joint=Joint(*joint, where="rear"), kernel=kernel)
        assert attended.joint_BJHK is not None
        return attended.out_BsHK, attended.joint_BJHK

    return call


def compiled(call: Callable[[], Pair]) -> tuple[Callable[[], Pair], dict[str, Any]]:
    """`call` compiled as one graph; where it is not one, in pieces, and how many breaks that takes."""
    torch._dynamo.reset()
    counters.clear()
    whole = torch.compile(call, fullgraph=True)
    try:
        whole()
    except Exception as error:
        told = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    else:
        return whole, {"fullgraph": True}
    torch._dynamo.reset()
    counters.clear()
    pieces = torch.compile(call)
    pieces()
    return pieces, {"fullgraph": False, "breaks": sum(counters["graph_break"].values()), "refusal": told}


def reference(q: list[Tensor], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Every 16th picture query and all joint ones, attended in float64."""
    exact = next(kernel for kernel in KERNELS if kernel.name == "sdpa-math")
    rows = [x[:, ::16].double() if n == 0 else x.double() for n, x in enumerate(q)]
    return tuple(exact(x, k.double(), v.double()) for x in rows)  # type: ignore[return-value]


def worst(got: Pair, want: Pair) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(got, want, strict=True))


def compare(usp: Any, backend: str, kernel: str, sizes: tuple[int, int, int, int], repeats: int) -> dict[str, Any]:
    S, J, H, K = sizes
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    generator = torch.Generator(DEVICE).manual_seed(0)
    qkv, joint = (
        [torch.randn(1, n, H, K, device=DEVICE, generator=generator).to(dtype) for _ in range(3)] for n in (S, J)
    )
    from xfuser.core.distributed import get_runtime_state

    get_runtime_state().set_attention_backend(backend)
    views = [[x.transpose(1, 2) for x in of] for of in (qkv, joint)]
    copies = [[x.contiguous() for x in of] for of in views]
    calls = {
        "ours": ours(kernel, qkv, joint),
        "xDiT": xdit(usp, *views),
        "xDiT, heads first": xdit(usp, *copies),
    }
    exact = reference([qkv[0], joint[0]], torch.cat([qkv[1], joint[1]], 1), torch.cat([qkv[2], joint[2]], 1))
    results: dict[str, Any] = {"kernel": kernel}
    outs = {name: call() for name, call in calls.items()}
    results["same bits"] = all(torch.equal(a, b) for a, b in zip(outs["ours"], outs["xDiT"], strict=True))
    results["apart"] = worst(outs["ours"], outs["xDiT"])
    results["off from float64"] = {n: worst((out[0][:, ::16], out[1]), exact) for n, out in outs.items()}
    for how in ("eager", "compiled"):
        if how == "compiled":
            made = {name: compiled(call) for name, call in calls.items()}
            results["graphs"] = {name: told for name, (_, told) in made.items()}
            calls = {name: call for name, (call, _) in made.items()}
        times = alternating(calls, DEVICE, repeats, warmup=3)
        results[how] = {name: statistics.median(of) * 1e3 for name, of in times.items()}
    return results


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sizes = (211, 8, 4, 16) if options.tiny else (14867, 64, 24, 128)
    usp = import_usp()
    report: dict[str, Any] = {
        "machine": machine(DEVICE),
        "xfuser": importlib.metadata.version("xfuser"),
        "sizes": dict(zip(("tokens", "joint tokens", "heads", "head size"), sizes, strict=True)),
    }
    rows = []
    for backend, kernel in PAIRS.items():
        try:
            result = report[backend] = compare(usp, backend, kernel, sizes, 3 if options.tiny else 20)
        except Exception as error:  # one kernel that fails must not lose the others
            report[backend] = {"failed": f"{type(error).__name__}: {error}"[:500]}
            print(f"{backend}: {report[backend]['failed']}", flush=True)
            continue
        for how in ("eager", "compiled"):
            times = result[how]
            spent = [f"{of:.3f}" for of in times.values()]
            ratio = f"{times['xDiT'] / times['ours']:.2f}"
            rows.append([kernel, how, *spent, ratio, f"{result['apart']:.0e}", str(result["same bits"])])
        if options.out is not None:
            options.out.write_text(json.dumps(report, indent=1))
    print(json.dumps(report, indent=1))
    heads = ["kernel", "how", "ours ms", "xDiT ms", "heads first", "xDiT / ours", "apart", "same bits"]
    for row in (heads, *rows):
        print("".join(f"{cell:>13}" for cell in row))


if __name__ == "__main__":
    main()
