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
    if layout.tensor > min(config.heads, config.heads_a):
        raise LayoutError(
            f"layout tensor={layout.tensor} is not accepted: the model has {config.heads} video and {config.heads_a} "
            f"audio heads to split; at most {min(config.heads, config.heads_a)}."
        )
    heads = config.heads // layout.tensor
    if layout.ulysses > heads:
        each = f"each part of tensor={layout.tensor}" if layout.tensor > 1 else "the model"
        raise LayoutError(
            f"layout ulysses={layout.ulysses} is not accepted: {each} has {heads} video heads to split; "
            f"at most {heads}, and ring for more ranks."
        )
