"""The transformer's configuration, read strictly: the released files differ from diffusers' class defaults."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from diptych.errors import CheckpointError

MAX_BLOCKS = 1000
"""Far above the 60 of the largest published checkpoint."""


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _three(value: object, kind: Callable[[object], bool]) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and all(kind(n) and n for n in value)


_KINDS: dict[str, Callable[[object], bool]] = {
    "int": _whole,
    "float": _real,
    "bool": lambda value: isinstance(value, bool),
    "tuple[int, int, int]": lambda value: _three(value, _whole),
    "tuple[float, float, float]": lambda value: _three(value, _real),
}
"""Whether a value can be what a field's annotation says; numbers that are nothing or endless make no transformer."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Shapes of one Kandinsky 6 transformer, with the field names of its config.json.

    D = model_dim, Da = model_dim_a; heads = dim / sum(axes_dims). Fields without a default must stand in the file.
    """

    in_visual_dim: int
    out_visual_dim: int
    in_audio_dim: int
    out_audio_dim: int
    in_text_dim: int
    in_text_dim2: int
    time_dim: int
    model_dim: int
    ff_dim: int
    time_dim_a: int
    model_dim_a: int
    ff_dim_a: int
    num_text_blocks: int
    num_visual_blocks: int
    axes_dims: tuple[int, int, int]
    axes_dims_a: tuple[int, int, int]
    audio_freqs_scaling: float
    scale_factor: tuple[float, float, float] = (1.0, 2.0, 2.0)
    patch_size: tuple[int, int, int] = (1, 2, 2)
    visual_cond: bool = True
    text_token_padding: bool
    ca_rope: bool
    cross_gates: bool
    fix_modulation: bool
    visual_token_type_num_embeddings: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not _KINDS[str(field.type)](value):
                raise CheckpointError(f"transformer {field.name} = {value!r} is not accepted: {field.type} is expected")
        for name in ("num_text_blocks", "num_visual_blocks"):
            if getattr(self, name) > MAX_BLOCKS:  # every tensor of every block is named before one is looked for
                raise CheckpointError(f"transformer {name} is not accepted: at most {MAX_BLOCKS}")
        if self.patch_size != (1, 2, 2):
            raise CheckpointError(f"transformer patch_size = {self.patch_size} is not supported: only (1, 2, 2)")
        for name in ("ca_rope", "cross_gates", "fix_modulation", "visual_cond"):
            if not getattr(self, name):
                raise CheckpointError(f"transformer {name} = False is not supported: every released checkpoint sets it")
        for dim, axes, side in (
            (self.model_dim, self.axes_dims, ""),
            (self.model_dim_a, self.axes_dims_a, "_a"),
        ):
            if dim % sum(axes):
                raise CheckpointError(
                    f"transformer model_dim{side} = {dim} is not a multiple of the head size {sum(axes)}"
                )
        if self.head_dim != self.head_dim_a:
            raise CheckpointError(
                "transformer head sizes of video and audio differ, so cross-modal rotation cannot work"
            )

    @property
    def head_dim(self) -> int:
        return sum(self.axes_dims)

    @property
    def head_dim_a(self) -> int:
        return sum(self.axes_dims_a)

    @property
    def heads(self) -> int:
        return self.model_dim // self.head_dim

    @property
    def heads_a(self) -> int:
        return self.model_dim_a // self.head_dim_a

    @property
    def grid(self) -> int:
        """Predictions per latent channel: 1 for flow matching, 10 for the distilled PiFlow heads."""
        return self.out_visual_dim // self.in_visual_dim

    @property
    def visual_in(self) -> int:
        """Channels of one input latent: noisy, condition, mask."""
        return 2 * self.in_visual_dim + 1

    @property
    def takes_image(self) -> bool:
        return self.visual_token_type_num_embeddings >= 2

    def distilled(self, grid: int = 10) -> TransformerConfig:
        """The same transformer with PiFlow heads: `grid` predictions per channel."""
        return replace(self, out_visual_dim=self.in_visual_dim * grid, out_audio_dim=self.in_audio_dim * grid)

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "transformer/config.json") -> TransformerConfig:
        """Read a config.json. Keys starting with `_` are ignored; any other unknown or missing key is an error."""
        values = {k: v for k, v in values.items() if not k.startswith("_")}
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise CheckpointError(f"{where}: unknown key {unknown[0]}")
        for name in ("axes_dims", "axes_dims_a", "patch_size", "scale_factor"):
            if name in values and values[name] is not None:
                values[name] = tuple(values[name]) if isinstance(values[name], list) else values[name]
        for plain in (
            "model_dim",
            "time_dim",
            "ff_dim",
            "axes_dims",
        ):  # null means "as video", as in diffusers
            if values.get(f"{plain}_a") is None and plain in values:
                values[f"{plain}_a"] = values[plain]
        try:
            return cls(**values)
        except TypeError as error:
            raise CheckpointError(f"{where}: {error}".replace("TransformerConfig.__init__() ", "")) from None

    def to_dict(self) -> dict[str, Any]:
        """As config.json holds it, lists for tuples."""
        raw = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in raw.items()}


_RELEASED: dict[str, Any] = {
    "in_visual_dim": 16,
    "out_visual_dim": 16,
    "in_audio_dim": 40,
    "out_audio_dim": 40,
    "in_text_dim": 3584,
    "in_text_dim2": 768,
    "audio_freqs_scaling": 0.144,
    "text_token_padding": True,
    "ca_rope": True,
    "cross_gates": True,
    "fix_modulation": True,
    "visual_token_type_num_embeddings": 2,
}

PRO = TransformerConfig(
    **_RELEASED,
    model_dim=4096,
    ff_dim=16384,
    time_dim=1024,
    model_dim_a=2048,
    ff_dim_a=7168,
    time_dim_a=1024,
    num_text_blocks=4,
    num_visual_blocks=60,
    axes_dims=(32, 48, 48),
    axes_dims_a=(32, 48, 48),
)
LITE = TransformerConfig(
    **_RELEASED,
    model_dim=1792,
    ff_dim=7168,
    time_dim=512,
    model_dim_a=896,
    ff_dim_a=3584,
    time_dim_a=512,
    num_text_blocks=2,
    num_visual_blocks=32,
    axes_dims=(16, 24, 24),
    axes_dims_a=(16, 24, 24),
)
TINY = TransformerConfig(
    **(_RELEASED | {"in_text_dim": 48, "in_text_dim2": 24}),
    model_dim=80,
    ff_dim=128,
    time_dim=32,
    model_dim_a=48,
    ff_dim_a=96,
    time_dim_a=24,
    num_text_blocks=2,
    num_visual_blocks=3,
    axes_dims=(4, 6, 6),
    axes_dims_a=(4, 6, 6),
)
"""Small enough for any test; 5 video and 3 audio heads, so that nothing divides by accident."""
