"""What is planned and measured: a model by name, a clip by its size."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from diptych.errors import RequestError
from diptych.model.config import LITE, PRO, TINY, TransformerConfig

MODELS: dict[str, TransformerConfig] = {
    "pro": PRO,
    "lite": LITE,
    "pro-distill": PRO.distilled(),
    "lite-distill": LITE.distilled(),
    "tiny": TINY,
    "tiny-distill": TINY.distilled(),
}
TEXT_TOKENS = 200


@dataclass(frozen=True)
class Geometry:
    """A clip by width, height (pixels) and frames at 24 fps; written `864x480x125`."""

    width: int
    height: int
    frames: int

    @classmethod
    def parse(cls, text: str) -> Geometry:
        """Raises `RequestError` for anything but WIDTHxHEIGHTxFRAMES in steps of 16 pixels and 1 + 4n frames."""
        match = re.fullmatch(r"(\d{1,9})x(\d{1,9})x(\d{1,9})", text)
        width, height, frames = map(int, match.groups()) if match else (0, 0, 0)
        if not (width and height and frames) or width % 16 or height % 16 or frames % 4 != 1:
            raise RequestError(
                "geometry", text, "write WIDTHxHEIGHTxFRAMES, sides in steps of 16, 1 + 4n frames, as 864x480x125"
            )
        return cls(width, height, frames)

    @property
    def latents(self) -> tuple[int, int, int]:
        """Frames, rows and columns of the latent video."""
        return (self.frames - 1) // 4 + 1, self.height // 8, self.width // 8

    @property
    def tokens(self) -> int:
        T, Y, X = self.latents
        return T * (Y // 2) * (X // 2)

    @property
    def audio_tokens(self) -> int:
        return math.ceil(self.frames / 24 * 44_100 / 1024)

    def __str__(self) -> str:
        return f"{self.width}x{self.height}x{self.frames}"


def config_named(name: str, blocks: int | None = None) -> TransformerConfig:
    """The configuration called `name`, with its first `blocks` fused blocks. Raises `RequestError` for another name."""
    if name not in MODELS:
        raise RequestError("model", name, "use one of " + ", ".join(MODELS))
    config = MODELS[name]
    if blocks is None:
        return config
    if not 1 <= blocks <= config.num_visual_blocks:
        raise RequestError("blocks", blocks, f"{name} has 1 to {config.num_visual_blocks} fused blocks")
    return replace(config, num_visual_blocks=blocks)
