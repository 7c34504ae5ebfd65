"""LoRA adapters, by PEFT, on a model that is split: loaded before or after, on any layer."""

from __future__ import annotations

import pytest
from adapter_work import adapted
from dropin_models import Call

from diptych.parallel import Layout

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("call", [Call("kandinsky6", audio=5), Call("flux"), Call("hunyuan")], ids=lambda c: c.model)
def test_an_adapter_does_what_it_does_in_one_process(ranks, call: Call) -> None:
    for result in ranks(2)(adapted, Layout(ring=2), call):
        assert result.pop("matters") > 0.1
        assert max(result.values()) <= 5e-6, result
