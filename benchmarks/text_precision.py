"""The language model of the released checkpoints in 16, 8 and 4 bits: bytes, seconds of a text, distance from exact.

    python benchmarks/text_precision.py OUT.json            # one GPU with 20 GiB free
    python benchmarks/text_precision.py OUT.json --quick    # two narrow layers, anywhere

Random weights, so the distance says what rounding does to a model that was not trained, and no more.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen2_5_VLTextModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig

from diptych.memory.footprint import GIB, RELEASED
from diptych.model.loading import ParametersOnMeta, place_plain
from diptych.model.quantised import quantise_linears

TOKENS = 329
"""A prompt of 200 tokens behind the template's 129."""
RELEASED_SIZES = {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "vocab_size": 152_064}
QUICK_SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512}


def model_of(sizes: dict[str, int], form: str | None, device: torch.device) -> nn.Module:
    """Random weights, the same in every form, each quantised as it comes."""
    heads = sizes["hidden_size"] // 128
    config = Qwen2_5_VLTextConfig(**sizes, num_attention_heads=heads, num_key_value_heads=max(heads // 7, 1))
    with ParametersOnMeta():
        model = Qwen2_5_VLTextModel(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    if form is not None:
        quantise_linears(model, form)
    generator = torch.Generator(device).manual_seed(0)
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator, device=device) * 0.02 + (1.0 if "norm" in name else 0.0)
        place_plain(model, name, value.bfloat16())
    for name, buffer in list(model.named_buffers()):
        place_plain(model, name, buffer.to(device))
    return model.eval()


def held(model: nn.Module) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in (*model.parameters(), *model.buffers()))


def predicted(sizes: dict[str, int], form: str) -> int | None:
    """What the plan counts; of the released sizes only."""
    return RELEASED.in_text_precision(form, 2).language if sizes == RELEASED_SIZES else None  # type: ignore[arg-type]


@torch.no_grad()
def measure(sizes: dict[str, int], device: torch.device, runs: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    ids = torch.randint(0, sizes["vocab_size"], (1, TOKENS), generator=torch.Generator().manual_seed(1)).to(device)
    exact = None
    for form in ("exact", "8bit", "nf4"):
        model = model_of(sizes, None if form == "exact" else form, device)
        nbytes = held(model)
        seconds, peak = [], 0
        for run in range(runs + 1):
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            out = model(input_ids=ids, use_cache=False).last_hidden_state
            if device.type == "cuda":
                torch.cuda.synchronize()
                peak = torch.cuda.max_memory_allocated() - before
            if run:
                seconds.append(time.perf_counter() - start)
        out = out.double()
        exact = out if exact is None else exact
        rows.append(
            {
                "form": form,
                "bytes": nbytes,
                "predicted": predicted(sizes, form),
                "work": peak,
                "seconds": sorted(seconds)[len(seconds) // 2],
                "apart": float((out - exact).norm() / exact.norm()),
            }
        )
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = QUICK_SIZES if given.quick else RELEASED_SIZES
    rows = measure(sizes, device, 2 if given.quick else 10)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    about = {"device": name, "torch": torch.__version__, "tokens": TOKENS, "sizes": sizes, "rows": rows}
    given.out.write_text(json.dumps(about, indent=1) + "\n")
    print(f"{'form':8}{'GiB':>8}{'predicted':>11}{'work, GiB':>11}{'ms a text':>11}{'apart':>9}")
    for row in rows:
        told = "" if row["predicted"] is None else f"{row['predicted'] / GIB:.3f}"
        line = f"{row['form']:8}{row['bytes'] / GIB:8.3f}{told:>11}{row['work'] / GIB:11.3f}"
        print(f"{line}{1e3 * row['seconds']:11.1f}{row['apart']:9.4f}")


if __name__ == "__main__":
    main()
