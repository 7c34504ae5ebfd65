"""Split models compile, block by block or whole, without a break, and follow when they are switched."""

from __future__ import annotations

import pytest
from compile_work import compiled, compiled_then_switched
from dropin_models import Call

from diptych.parallel import Layout

pytestmark = pytest.mark.distributed

CALLS = {
    "kandinsky6": Call("kandinsky6", audio=9, batch=2, hidden_text=2),
    "flux": Call("flux"),
    "hunyuan": Call("hunyuan", hidden_text=2),
}
"""45, 15 and 45 tokens, 5 or 3 heads: uneven on two ranks."""


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "whole"])
def test_no_break(ranks, name: str, whole: bool) -> None:
    for result in ranks(2)(compiled, Layout(ulysses=2), [CALLS[name]], whole):
        assert result["breaks"] == 0
        assert result["graphs"][0] == GRAPHS[name, whole]
        assert max(result["off"][0]) <= 5e-6


GRAPHS = {
    ("kandinsky6", False): 3,  # text blocks of either tower, fused blocks: 7 blocks in 3 graphs
    ("flux", False): 3,
    ("hunyuan", False): 5,
    ("kandinsky6", True): 1,
    ("flux", True): 1,
    ("hunyuan", True): 1,
}


def test_a_compiled_model_follows_the_switch(ranks) -> None:
    """Compiled graphs do not look for new hooks: stock, then split, then stock again."""
    for result in ranks(2)(compiled_then_switched, Layout(ring=2), CALLS["flux"]):
        assert result[0] <= 5e-6
        assert 0 < result[1] <= 5e-6, "the ring changes the last bits: exactly 0 is a model that is not split"
        assert result[2] <= 5e-6
