"""Where the time of a forward goes, by class of kernel, so that the next gap is visible."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

CLASSES = (
    ("attention", r"flash|fmha|attention|sdpa|cudnn_generated|sm90_.*_prefill|FlashAttn"),
    ("linear", r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitK|dot_kernel|addmm|matmul|aten::mm|::linear"),
    ("convolution", r"conv|implicit|wgrad|dgrad|fprop"),
    ("copies", r"Memcpy|Memset|copy_kernel|aten::copy_|CatArray"),
)
"""Class and pattern, the first that matches; everything else is element-wise work."""


def classify(kernel: str) -> str:
    """The class of a kernel by its name."""
    for name, pattern in CLASSES:
        if re.search(pattern, kernel, re.IGNORECASE):
            return name
    return "element-wise"


def by_class(call: Callable[[], object], device: torch.device, top: int = 25) -> dict[str, Any]:
    """Seconds on the device by class, and the `top` kernels with their class, seconds and launches."""
    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as trace:
        call()
        if cuda:
            torch.cuda.synchronize(device)
    kernels: list[tuple[str, float, int]] = []
    for event in trace.key_averages():
        spent = event.self_device_time_total if cuda else event.self_cpu_time_total
        if spent > 0:
            kernels.append((event.key, spent / 1e6, event.count))
    kernels.sort(key=lambda kernel: -kernel[1])
    classes = {name: 0.0 for name, _ in CLASSES} | {"element-wise": 0.0}
    for name, spent, _ in kernels:
        classes[classify(name)] += spent
    return {
        "seconds": classes,
        "launches": sum(count for _, _, count in kernels),
        "top": [
            {"kernel": name[:160], "class": classify(name), "seconds": spent, "launches": count}
            for name, spent, count in kernels[:top]
        ],
    }
