"""Where a stock model is cut: what every model class has in common.

The model's own forward runs on every rank, unmodified, on this rank's tokens. A hook before it cuts the inputs, a hook
after it joins the outputs, and the attentions that need other ranks' tokens get processors of ours. No hook sits on a
layer with weights, so that adapters may replace any of them; none differs from block to block, so that a compiled
block serves all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from diptych.attention import Place
from diptych.diffusers.pipeline import Pipe, PipedBlocks
from diptych.errors import LayoutError
from diptych.parallel import TokenShard
from diptych.parallel.patches import PatchShard


class Shared:
    """What the seams and processors of one model know together; `shard` is renewed by each forward.

    pipe: where the blocks lie on several ranks; then tokens are held by patches.
    """

    def __init__(self, place: Place, pipe: Pipe | None = None) -> None:
        self.place, self.pipe = place, pipe
        self._shard: TokenShard | PatchShard | None = None

    def begin(self, tokens: int) -> TokenShard | PatchShard:
        """Split `tokens` for the forward that begins. Raises `LayoutError` if a rank would have none."""
        if tokens < self.place.world:
            raise LayoutError(
                f"{tokens} tokens are not accepted on {self.place.world} ranks: at least one for each of them."
            )
        if self.pipe is None:
            self._shard = TokenShard(tokens, self.place)
        else:
            self._shard = PatchShard(tokens, self.pipe.patches, self.place)
        return self._shard

    @property
    def shard(self) -> TokenShard | PatchShard:
        assert self._shard is not None, "attention outside of a forward"
        return self._shard

    @property
    def rows(self) -> int:
        """How many split tokens this rank has in the present call of a block."""
        if isinstance(self.shard, PatchShard):
            assert self.pipe is not None
            return self.shard.size(self.pipe.patch)
        return self.shard.span.size


class Seams(ABC):
    """How one model class is split over ranks.

    stock: the names of the processor classes that ours stand in for; a model that uses another one is refused.
    piped: how its blocks are called, where they can lie on several ranks.
    """

    stock: ClassVar[tuple[str, ...]]
    piped: ClassVar[type[PipedBlocks] | None] = None

    def __init__(self, model: Any, place: Place, pipe: Pipe | None = None) -> None:
        self.model = model
        self.shared = Shared(place, pipe)

    @abstractmethod
    def processors(self) -> dict[str, Any]:
        """A processor of ours for each attention, by module name, that meets tokens of other ranks."""

    @abstractmethod
    def scatter(self, given: dict[str, Any]) -> dict[str, Any]:
        """This rank's arguments of a forward, by name, from those of one process."""

    @abstractmethod
    def gather(self, sample: Tensor) -> Tensor:
        """The output of one process, on every rank, from this rank's own."""

    def hooks(self) -> list[RemovableHandle]:
        """Hooks inside the model, beside those around its forward."""
        return []


def joined(output: Any, sample: Tensor) -> Any:
    """A model's output, tuple or dataclass, with another first tensor."""
    if isinstance(output, tuple):
        return (sample, *output[1:])
    return type(output)(**(dict(output) | {"sample": sample}))


def changed(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A model's output, tuple or dataclass, with every tensor changed."""
    if isinstance(output, tuple):
        return tuple(change(x) for x in output)
    return type(output)(**{name: change(x) for name, x in dict(output).items()})


def submodules(model: nn.Module, endings: Mapping[str, Any]) -> dict[str, Any]:
    """For each module whose name ends with a key: the value."""
    return {
        name: value
        for name, _ in model.named_modules()
        for ending, value in endings.items()
        if name == ending or name.endswith("." + ending)
    }
