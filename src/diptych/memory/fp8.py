"""fp8 by name: which layers of the transformer are quantised, and how, tensor by tensor.

Only the products on video tokens: they are 97 % of a forward's linear work and have rows enough to pay for their
quantisation. Modulation, time, text, audio and the heads stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from diptych.memory.footprint import VIDEO_LINEARS
from diptych.model.blocks import FusedBlock
from diptych.model.fp8 import Fp8Linear
from diptych.model.transformer import Transformer


def quantise(model: Transformer, *, exact_first: int = 0, exact_last: int = 0) -> Transformer:
    """Quantise the video products of every fused block in place, except the first and last that are to stay exact.

    One layer at a time: the peak is that of the model before, plus one layer. A model on meta takes its weights
    quantised when it is loaded: the peak is that of the result, plus one tensor. Returns the same model.
    """
    blocks = model.fused_blocks
    assert exact_first >= 0 and exact_last >= 0 and exact_first + exact_last <= len(blocks)
    for block in blocks[exact_first : len(blocks) - exact_last]:
        if isinstance(block, FusedBlock):  # and not on another rank
            quantise_block(block)
    return model


def quantise_block(block: FusedBlock) -> None:
    """The same for one block."""
    for path, linear in list(_linears(block)):
        parent, _, name = path.rpartition(".")
        setattr(block.get_submodule(parent), name, Fp8Linear.quantised(linear))


def _linears(block: FusedBlock) -> Iterator[tuple[str, nn.Linear]]:
    for path in VIDEO_LINEARS:
        layer = block.get_submodule(path)
        assert isinstance(layer, nn.Linear), f"{path} is quantised already, or carries an adapter: merge it first"
        yield path, layer
