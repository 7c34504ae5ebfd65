"""Ordinary pipeline calls of Kandinsky 6 on several ranks, against the same calls in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from pipeline_work import clips, loaded_parallel

from diptych.parallel import Layout

pytestmark = pytest.mark.distributed

LATENT = {"output_type": "latent", "num_inference_steps": 2}
BASE = {
    "text, guided": {"prompt": "a red circle", "guidance_scale": 3.0} | LATENT,
    "image, guided, decoded": {
        "prompt": "a red circle",
        "from_image": True,
        "guidance_scale": 5.0,
        "num_inference_steps": 1,
        "output_type": "np",
    },
    "video only, not guided": {"prompt": "waves", "sample_audio": False, "guidance_scale": 1.0} | LATENT,
    "embeddings passed in": {"embedded": True, "guidance_scale": 3.0} | LATENT,
    "two prompts, one padded": {"prompt": ["a red circle", "a blue square and waves"], "guidance_scale": 1.0} | LATENT,
}
DISTILLED = {
    "PiFlow": {"prompt": "a red circle", "guidance_scale": 1.0, "num_inference_steps": 6, "output_type": "latent"}
}


def check(results: list[dict], names: list[str]) -> None:
    for name, result in zip(names, results, strict=True):
        assert result["forwards"][0] == result["forwards"][1], name
        assert result["velocity"] <= 5e-6, name
        assert result["frames"] <= 1e-5, name
        assert result["sound"] is None or result["sound"] <= 1e-5, name


@pytest.mark.parametrize("layout", [Layout(ulysses=2), Layout(ring=3)], ids=str)
def test_base(ranks, tiny_base: Path, layout: Layout) -> None:
    for results in ranks(layout.world)(clips, tiny_base, layout, list(BASE.values())):
        check(results, list(BASE))
        assert (results[2]["sound"] is None) and (results[0]["sound"] is not None)


def test_distilled(ranks, tiny_distilled: Path) -> None:
    for results in ranks(2)(clips, tiny_distilled, Layout(ring=2), list(DISTILLED.values())):
        check(results, list(DISTILLED))


def test_from_pretrained_with_a_parallel_config(ranks, tiny_base: Path) -> None:
    for undone, off in ranks(2)(loaded_parallel, tiny_base):
        assert undone
        assert off <= 5e-6
