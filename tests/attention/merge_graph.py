"""Trace a merge of three parts on a GPU that need not exist; print what the graph holds as JSON."""

from __future__ import annotations

import json
from unittest.mock import patch

import torch
from torch._subclasses import FakeTensorMode

from diptych.attention.merge import merge

graphs: list[torch.fx.GraphModule] = []


def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
    graphs.append(graph)
    return graph.forward


@torch.no_grad()
def main() -> None:
    with FakeTensorMode(), patch("torch.utils._triton.has_triton", lambda: True):  # which asks for a real GPU
        parts = [
            (
                torch.empty(1, 6, 4, 64, device="cuda", dtype=torch.bfloat16),
                torch.empty(1, 4, 6, device="cuda").transpose(1, 2),
            )
            for _ in range(3)
        ]
        torch.compile(merge, fullgraph=True, backend=keep)(parts, torch.bfloat16)
    called = [node.target for graph in graphs for node in graph.graph.nodes if node.op.startswith("call")]
    launches = [target for target in called if "triton_kernel_wrapper" in str(target)]
    others = [str(target) for target in called if target not in (*launches, torch.empty, torch.empty_like, "to")]
    print(json.dumps({"graphs": len(graphs), "launches": len(launches), "other arithmetic": others}))


if __name__ == "__main__":
    main()
