"""A split model returns, on every rank, what the stock model returns in one process."""

from __future__ import annotations

import pytest
import torch
from dropin_models import Call
from dropin_work import velocities

from diptych.parallel import Layout

pytestmark = pytest.mark.distributed

LAYOUTS = [Layout(ulysses=2), Layout(ring=2), Layout(ulysses=3), Layout(ring=3), Layout(ring=2, ulysses=2)]
KANDINSKY6 = {
    "video and sound": Call("kandinsky6", audio=9),
    "video only": Call("kandinsky6"),
    "from an image": Call("kandinsky6", audio=5, image=True),
    "two clips, one text shorter": Call("kandinsky6", batch=2, audio=5, hidden_text=3),
    "two clips, from images, one text shorter, no sound": Call("kandinsky6", batch=2, image=True, hidden_text=3),
    "PiFlow heads, as few tokens as ranks": Call("kandinsky6-distilled", audio=3, grid=(1, 2, 2)),
}
FLUX = {
    "an image": Call("flux"),
    "two images, guidance embedded, text masked, odd length": Call(
        "flux-guidance", batch=2, grid=(1, 5, 5), guidance=True, hidden_text=3
    ),
    "control nets": Call("flux", controlnet=True),
}
HUNYUAN = {
    "text masked": Call("hunyuan", batch=2, hidden_text=3),
    "an image in the channels": Call("hunyuan-concat", hidden_text=1),
    "an image in place of the first frame": Call("hunyuan-replace", batch=2, hidden_text=2),
    "first frame on more than one rank": Call("hunyuan-replace", grid=(2, 4, 5)),
}
CALLS = {"Kandinsky 6": KANDINSKY6, "Flux": FLUX, "HunyuanVideo": HUNYUAN}
"""5 or 3 heads, and 45 tokens or others that nothing divides."""


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", CALLS)
def test_velocity_of_one_process(ranks, layout: Layout, family: str) -> None:
    calls = CALLS[family]
    results = ranks(layout.world)(velocities, layout, list(calls.values()))
    for i, name in enumerate(calls):
        of_ranks = [result[i] for result in results]
        for result in of_ranks:
            assert all(size > 0.5 for size in result["size"]), f"{name}: an output that small shows nothing"
            assert max(result["off"]) <= 5e-6, f"{name}: {result['off']}"
            assert result["undone"], f"{name}: disable() left something behind"
            for mine, first in zip(result["out"], of_ranks[0]["out"], strict=True):
                assert torch.equal(mine, first), f"{name}: ranks disagree"
