"""Loading: how fast a checkpoint's transformer comes from its files to the device."""

from __future__ import annotations

import time
from typing import Any

import torch

from diptych.bench.forward import machine
from diptych.model.checkpoint import Checkpoint
from diptych.model.loading import load_transformer
from diptych.model.transformer import Transformer


def bench_load(checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype, repeats: int = 2) -> dict[str, Any]:
    """Stream the transformer in, `repeats` times; the first reads from the disk unless the files are cached."""
    stored = checkpoint["transformer"].nbytes
    times = []
    for _ in range(repeats):
        with torch.device("meta"):
            model = Transformer(checkpoint.transformer)
        start = time.perf_counter()
        load_transformer(model, checkpoint, device=device, dtype=dtype)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
        del model
    return {
        "checkpoint": checkpoint.name,
        "bytes": stored,
        "dtype": str(dtype).removeprefix("torch."),
        "machine": machine(device),
        "seconds": times,
        "bytes_per_second": [stored / spent for spent in times],
    }
