"""Whether a model has work for every rank of a layout."""

from __future__ import annotations

from diptych.errors import LayoutError
from diptych.model.config import TransformerConfig
from diptych.parallel.layout import Layout


def check_fit(layout: Layout, config: TransformerConfig) -> None:
    """Raise `LayoutError` where a layout asks for ranks that would have nothing to do."""
    if layout.cfg == 2 and config.grid > 1:
        raise LayoutError(
            "layout cfg=2 is not accepted: a distilled checkpoint has no guidance to split; use ulysses=2."
        )
    if layout.pipeline > config.num_visual_blocks:
        raise LayoutError(
            f"layout pipeline={layout.pipeline} is not accepted: the model has {config.num_visual_blocks} blocks to "
            f"split; at most {config.num_visual_blocks}."
        )
    if layout.ulysses > config.heads:
        raise LayoutError(
            f"layout ulysses={layout.ulysses} is not accepted: the model has {config.heads} video heads to split; "
            f"at most {config.heads}, and ring for more ranks."
        )
