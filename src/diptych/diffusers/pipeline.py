"""PipeFusion for stock models: the blocks of one list after the other lie on several ranks.

The model's own forward runs on every rank. Where it would call block after block, it finds one that passes the patches
through the stages; only what the last stage makes of them is right, so the outputs come from there. What another stage
holds is taken out of the model, so that `model.to(...)` leaves it where it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from diptych.errors import LayoutError
from diptych.parallel.patches import BlockCaches, PatchShard
from diptych.parallel.stages import Stages, stage_blocks

LANES = 2
"""Passes a step: with guidance two."""


@dataclass
class Pipe:
    """Where this rank and this forward stand: pipelines tell a model its timestep, and nothing more.

    A timestep lower than the last is the next step; the same again is the other pass of guidance; a higher one, a third
    pass or another shape is a new request, which forgets everything. So each pass counts its own steps, and one without
    a cache is always exact.
    """

    stages: Stages
    warmup: int
    patches: int
    lane: int = 0
    patch: int | None = None
    exact: bool = True
    caches: dict[tuple[int, int], BlockCaches] = field(default_factory=dict)
    _steps: list[int] = field(default_factory=lambda: [0] * LANES)
    _last: tuple[float, torch.Size] | None = None

    def begin(self, timestep: Tensor, shape: torch.Size) -> None:
        """A forward begins. Waits for `timestep` where it lies on a GPU."""
        time = float(timestep.flatten()[0])
        before, self._last = self._last, (time, shape)
        new = before is None or shape != before[1] or time > before[0]
        again = before is not None and time == before[0]
        if new or (again and self.lane == LANES - 1):
            self.caches.clear()
            self._steps, self.lane = [0] * LANES, 0
        else:
            self.lane = self.lane + 1 if again else 0
        self.exact = self._steps[self.lane] < self.warmup
        self._steps[self.lane] += 1

    def of(self, attention: object) -> BlockCaches:
        """The caches of an attention in this pass."""
        return self.caches.setdefault((id(attention), self.lane), BlockCaches())


Call = dict[str, Any]
"""Arguments of a block, by name."""


class PipedBlocks(ABC):
    """How the blocks of one model class are called. lists: where they stand, in order. names: of their arguments.

    split, beside: the argument whose tokens are split into patches, and the one that goes with them; it may be None.
    """

    lists: ClassVar[tuple[str, ...]]
    names: ClassVar[tuple[str, ...]]
    split: ClassVar[str]
    beside: ClassVar[str]

    @abstractmethod
    def piece(self, call: Call, own: slice, patch: int | None) -> Call:
        """The call for one patch, or all, given where its tokens stand among this rank's."""

    @abstractmethod
    def result(self, output: Any) -> tuple[Tensor, Tensor | None]:
        """What a block returned: split, beside."""

    @abstractmethod
    def output(self, split: Tensor, beside: Tensor | None) -> Any:
        """The same the other way round."""

    @abstractmethod
    def joined(self, besides: list[Tensor | None]) -> Tensor | None:
        """What goes beside the patches, after the last block, from that of every patch."""

    def streams(self, call: Call) -> list[Tensor]:
        return [call[name] for name in (self.split, self.beside) if call[name] is not None]


class StageList(nn.ModuleList):
    """Stands for a list of blocks: by name and number it has this stage's; who walks over it gets `instead`."""

    def __init__(self, blocks: nn.ModuleList, held: range, instead: list[Any]) -> None:
        super().__init__([block if n in held else nn.Identity() for n, block in enumerate(blocks)])
        self.__dict__["instead"] = instead  # what is called here is no child

    def __iter__(self) -> Iterator[Any]:
        instead: list[Any] = self.__dict__["instead"]
        return iter(instead)


class Staged:
    """A model whose blocks are held stage by stage, and the way back."""

    def __init__(self, model: Any, blocks: PipedBlocks, pipe: Pipe) -> None:
        self.model, self.blocks, self.pipe = model, blocks, pipe
        self.shard: PatchShard | None = None
        self.whole = {name: getattr(model, name) for name in blocks.lists}
        every = [block for name in blocks.lists for block in self.whole[name]]
        held = stage_blocks(len(every), pipe.stages.count, pipe.stages.stage)
        self.held = every[held.start : held.stop]
        start = 0
        for number, (name, of_name) in enumerate(self.whole.items()):
            here = range(max(held.start - start, 0), max(held.stop - start, 0))
            setattr(model, name, StageList(of_name, here, [] if number else [self.run]))
            start += len(of_name)

    def check(self) -> None:
        """Raises `LayoutError` for blocks that were compiled: a graph would be that of one block, patch and pass."""
        if any(block._compiled_call_impl is not None for block in self.held):
            raise LayoutError(
                "compiled blocks are not accepted with pipeline stages, whose keys differ from patch to patch: leave "
                "compile_repeated_blocks out, or use ring and ulysses."
            )

    def undo(self) -> None:
        device = self.model.device
        for name, blocks in self.whole.items():
            setattr(self.model, name, blocks.to(device))

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """In place of all blocks: this stage's, for one patch after the other."""
        call: Call = dict(zip(self.blocks.names, args, strict=False)) | kwargs
        pipe, shard = self.pipe, self.shard
        assert shard is not None
        exact = pipe.exact or shard.patches == 1
        patches = [None] if exact else list(range(shard.patches))
        pieces = [self.blocks.piece(call, shard.own(patch), patch) for patch in patches]

        def compute(unit: int, received: list[Tensor] | None) -> list[Tensor]:
            pipe.patch, piece = patches[unit], pieces[unit]
            if received is not None:
                piece[self.blocks.split] = received[0]
                piece[self.blocks.beside] = received[1] if len(received) > 1 else None
            for block in self.held:
                piece[self.blocks.split], piece[self.blocks.beside] = self.blocks.result(block(**piece))
            return self.blocks.streams(piece)

        def shapes(unit: int) -> list[tuple[int, ...]]:
            return [tuple(x.shape) for x in self.blocks.streams(pieces[unit])]

        made = pipe.stages.run(len(patches), compute, shapes, call[self.blocks.split])
        if not pipe.stages.last:  # of the right shape, for heads whose outputs nobody will see
            return self.blocks.output(call[self.blocks.split], call[self.blocks.beside])
        besides = [of_patch[1] if len(of_patch) > 1 else None for of_patch in made]
        return self.blocks.output(torch.cat([of_patch[0] for of_patch in made], 1), self.blocks.joined(besides))
