"""Split models compile, block by block or whole, without a break, and follow when they are switched."""

from __future__ import annotations

import pytest
from compile_work import compiled, compiled_then_switched
from dropin_models import Call

from diptych.parallel import Layout

pytestmark = pytest.mark.distributed

CALLS = {
    "kandinsky6": Call("kandinsky6-short", audio=9, batch=2, hidden_text=2),
    "flux": Call("flux"),
    "hunyuan": Call("hunyuan", hidden_text=2),
}
"""45, 15 and 45 tokens, 5 or 3 heads: uneven on two ranks."""
WHOLE = CALLS | {"flux": Call("flux-short"), "hunyuan": Call("hunyuan-short", hidden_text=2)}
"""As a whole, a second block of a kind is compiled for what the first has shown."""


GRAPHS = {
    ("kandinsky6", "blocks"): 3,  # text blocks of either tower, fused blocks: 4 blocks in all
    ("flux", "blocks"): 3,  # as many as stock: single blocks twice, since the first gets other strides
    ("hunyuan", "blocks"): 5,  # the same, and the two embedders
    ("kandinsky6", "whole"): 3,  # cut, model, join
    ("flux", "whole"): 3,
    ("hunyuan", "whole"): 3,
}


@pytest.mark.parametrize(("name", "how"), GRAPHS)
def test_no_break(ranks, name: str, how: str) -> None:
    call = (WHOLE if how == "whole" else CALLS)[name]
    for result in ranks(2)(compiled, Layout(ulysses=2), [call], how == "whole"):
        assert result["breaks"] == 0
        assert result["graphs"] == [GRAPHS[name, how]]
        assert max(result["off"][0]) <= 5e-6


def test_a_compiled_model_follows_the_switch(ranks) -> None:
    """Compiled graphs do not look for new hooks: stock, then split, then stock again."""
    for stock, split, again in ranks(2)(compiled_then_switched, Layout(ring=2), WHOLE["flux"]):
        assert stock <= 5e-6
        assert 0 < split <= 5e-6, "a ring changes the last bits: exactly 0 is a model that is not split"
        assert again <= 5e-6
