"""Where a stock model is cut: what every model class has in common.

The model's own forward runs on every rank, unmodified, on this rank's tokens. A hook before it cuts the inputs, a hook
after it joins the outputs, and the attentions that need other ranks' tokens get processors of ours. No hook sits on a
layer with weights, so that adapters may replace any of them; none differs from block to block, so that a compiled
block serves all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from diptych.attention import Place
from diptych.errors import LayoutError
from diptych.parallel import TokenShard


class Shared:
    """What the seams and processors of one model know together; `shard` is renewed by each forward."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._shard: TokenShard | None = None

    def begin(self, tokens: int) -> TokenShard:
        """Split `tokens` for the forward that begins. Raises `LayoutError` if a rank would have none."""
        if tokens < self.place.world:
            raise LayoutError(
                f"{tokens} tokens are not accepted on {self.place.world} ranks: at least one for each of them."
            )
        self._shard = TokenShard(tokens, self.place)
        return self._shard

    @property
    def shard(self) -> TokenShard:
        assert self._shard is not None, "attention outside of a forward"
        return self._shard


class Seams(ABC):
    """How one model class is split over ranks.

    stock: the names of the processor classes that ours stand in for; a model that uses another one is refused.
    """

    stock: ClassVar[tuple[str, ...]]

    def __init__(self, model: Any, place: Place) -> None:
        self.model = model
        self.shared = Shared(place)

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


def submodules(model: nn.Module, endings: Mapping[str, Any]) -> dict[str, Any]:
    """For each module whose name ends with a key: the value."""
    return {
        name: value
        for name, _ in model.named_modules()
        for ending, value in endings.items()
        if name == ending or name.endswith("." + ending)
    }
