"""What is asked for: `ClipRequest`, validated once, and what a checkpoint answers to what was left open."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from diptych.errors import MissingError, RequestError

if TYPE_CHECKING:
    from PIL.Image import Image

Fit = Literal["crop", "pad", "stretch"]
AudioLevel = Literal["clip", "normalize"]
SigmaGrid = Literal["diffusers", "native"]
NoiseDtype = Literal["float32", "bfloat16", "float16"]

PIXEL_MULTIPLE = 16
"""Width and height step: 8x in the video VAE, 2x in the patch."""
MAX_SIDE = 2048
"""128 rotary rows of 16 pixels."""
MAX_FRAMES = 509
"""128 latent frames: 4 * 127 + 1."""
MAX_AUDIO_LATENTS = 2048
"""Rows of the audio rotary table; 47.5 seconds."""
MAX_STEPS = 1000
MAX_GUIDANCE = 100.0
MAX_PROMPT_CHARACTERS = 32_000
MAX_TEXT_TOKENS = 1024
"""What the text encoder is given of a prompt, its end token included."""
MAX_SEED = 2**63 - 1

AUDIO_RATE = 44_100
SAMPLES_PER_AUDIO_LATENT = 1024


@dataclass(frozen=True, kw_only=True)
class ClipDefaults:
    """What a checkpoint fills in where a request says nothing, and what it can do."""

    width: int = 864
    height: int = 480
    frames: int = 121
    fps: float = 24.0
    steps: int = 50
    guidance: float = 5.0
    distilled: bool = False
    has_audio: bool = True
    has_image: bool = True
    example: str = ""
    """A prompt of the kind the checkpoint knows; empty: it knows any."""


@dataclass(frozen=True)
class ClipRequest:
    """One clip to make. Fields left `None` are filled from the checkpoint by `resolve`.

    prompt: what to show and to sound like.
    negative: what to steer away from; `None` or empty means the authors' default text (as diffusers does).
    image: first frame: a path, the bytes of an image file, or a PIL image.
    fit: how an image of another shape is fitted: `crop` (cover and centre crop), `pad`, or `stretch`.
    width, height: pixels, multiples of 16, at most 2048.
    frames: 4k + 1, at most 509; other counts are rounded as diffusers does (119 -> 117) and `notes` says so.
    seconds: the length instead of `frames`; the nearest 4k + 1 frames are taken.
    fps: frames a second, also the length of the sound.
    steps: forwards of the transformer (each doubled by guidance).
    guidance: 1 switches guidance off; a distilled checkpoint takes only 1.
    seed: of the CPU generator that draws all noise; `None` draws one and the report tells it.
    audio: whether to make sound.
    audio_level: `clip` keeps the decoded level, `normalize` raises the peak to full scale.
    sigma_grid: `diffusers` or `native`: the two published noise grids of the base models.
    noise_dtype: the dtype noise is drawn in; a bfloat16 diffusers run draws bfloat16 noise, which is other noise.
    max_text_tokens: text longer than this is cut.

    Numbers of other libraries, such as NumPy's, are taken as Python's. Raises `RequestError` for a value that no
    checkpoint could honour.
    """

    prompt: str
    negative: str | None = None
    image: str | Path | bytes | Image | None = None
    fit: Fit = "crop"
    width: int | None = None
    height: int | None = None
    frames: int | None = None
    seconds: float | None = None
    fps: float | None = None
    steps: int | None = None
    guidance: float | None = None
    seed: int | None = None
    audio: bool = True
    audio_level: AudioLevel = "clip"
    sigma_grid: SigmaGrid = "diffusers"
    noise_dtype: NoiseDtype = "float32"
    max_text_tokens: int = MAX_TEXT_TOKENS

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _plain(getattr(self, field.name)))
        _check_text("prompt", self.prompt)
        if not self.prompt.strip():
            raise RequestError("prompt", self.prompt, "say in words what the clip should show")
        if self.negative is not None:
            _check_text("negative", self.negative)
        _check_image(self.image)
        for name, choices in (
            ("fit", get_args(Fit)),
            ("audio_level", get_args(AudioLevel)),
            ("sigma_grid", get_args(SigmaGrid)),
            ("noise_dtype", get_args(NoiseDtype)),
        ):
            if getattr(self, name) not in choices:
                raise RequestError(name, getattr(self, name), "one of " + ", ".join(choices))
        if not isinstance(self.audio, bool):
            raise RequestError("audio", self.audio, "true or false")
        for name in ("width", "height"):
            _check_int(name, getattr(self, name), PIXEL_MULTIPLE, MAX_SIDE)
            value = getattr(self, name)
            if value is not None and value % PIXEL_MULTIPLE:
                below = max(PIXEL_MULTIPLE, value // PIXEL_MULTIPLE * PIXEL_MULTIPLE)
                raise RequestError(
                    name, value, f"a multiple of 16 pixels, such as {below} or {min(below + 16, MAX_SIDE)}"
                )
        _check_int("frames", self.frames, 1, MAX_FRAMES)
        _check_int("steps", self.steps, 1, MAX_STEPS)
        _check_int("seed", self.seed, 0, MAX_SEED)
        _check_int("max_text_tokens", self.max_text_tokens, 1, MAX_TEXT_TOKENS, or_none=False)
        _check_real("fps", self.fps, 1.0, 240.0)
        _check_real("seconds", self.seconds, 0.01, MAX_FRAMES)
        if self.seconds is not None and self.frames is not None:
            raise RequestError("seconds", self.seconds, "either seconds or frames, not both")
        _check_real("guidance", self.guidance, 0.0, MAX_GUIDANCE)

    def resolve(self, defaults: ClipDefaults) -> ResolvedRequest:
        """Fill what was left open and hold the request against what the checkpoint can do.

        Raises `RequestError` for guidance on a distilled checkpoint, sound or an image where there is none,
        a length of too many frames, or sound longer than the rotary table.
        """
        notes: list[str] = []
        fps = float(defaults.fps if self.fps is None else self.fps)
        if self.seconds is not None:
            frames = frames_for(self.seconds, fps)
            if frames > MAX_FRAMES:
                raise RequestError("seconds", self.seconds, f"at most {MAX_FRAMES / fps:.1f} s at {fps:g} fps")
        else:
            frames = defaults.frames if self.frames is None else self.frames
        if frames % 4 != 1:
            rounded = max(frames // 4 * 4 + 1, 1)
            notes.append(f"frames rounded from {frames} to {rounded}: the video VAE makes 4k + 1 frames")
            frames = rounded
        if frames > MAX_FRAMES:
            raise RequestError("frames", frames, f"at most {MAX_FRAMES}")
        guidance = float(defaults.guidance if self.guidance is None else self.guidance)
        if defaults.distilled and guidance != 1.0:
            raise RequestError("guidance", guidance, "a distilled checkpoint has guidance built in and takes only 1")
        if self.audio and not defaults.has_audio:
            raise RequestError("audio", True, "this checkpoint makes no sound; ask for video only (audio=False)")
        if self.image is not None and not defaults.has_image:
            raise RequestError("image", "given", "this checkpoint takes no image; leave it out")
        if self.audio and audio_latents(frames, fps) > MAX_AUDIO_LATENTS:
            limit = MAX_AUDIO_LATENTS * SAMPLES_PER_AUDIO_LATENT / AUDIO_RATE
            raise RequestError(
                "frames / fps",
                f"{frames} / {fps:g}",
                f"sound of at most {limit:.1f} s; fewer frames or a higher fps",
            )
        filled = replace(
            self,
            width=defaults.width if self.width is None else self.width,
            height=defaults.height if self.height is None else self.height,
            frames=frames,
            seconds=None,
            fps=fps,
            steps=defaults.steps if self.steps is None else self.steps,
            guidance=guidance,
        )
        return ResolvedRequest(filled, defaults.distilled, tuple(notes))

    def to_dict(self) -> dict[str, Any]:
        """The request as JSON values, without what was left open; an image is told by its path or as `"<embedded>"`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if values["image"] is not None:
            is_path = isinstance(values["image"], str | Path)
            values["image"] = str(values["image"]) if is_path else "<embedded>"
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ClipRequest:
        """Build from decoded JSON. Raises `RequestError` for an unknown field, naming the nearest known one."""
        if not isinstance(values, Mapping):
            raise RequestError("request", values, "an object of fields and values")
        known = {f.name for f in fields(cls)}
        for name in values:
            if not isinstance(name, str):
                raise RequestError("field", name, "the name of a field")
            if name not in known:
                raise RequestError(name, values[name], _nearest(name, known))
        if "prompt" not in values:
            raise MissingError("prompt", "say in words what the clip should show")
        return cls(**values)


@dataclass(frozen=True)
class ResolvedRequest:
    """A request with every open field filled, and the sizes that follow from it.

    T, Y, X: latent frames (without the tail), rows and columns; A: audio latents, 0 without sound.
    """

    request: ClipRequest
    distilled: bool
    notes: tuple[str, ...] = ()

    @property
    def prompt(self) -> str:
        return self.request.prompt

    @property
    def width(self) -> int:
        return cast(int, self.request.width)

    @property
    def height(self) -> int:
        return cast(int, self.request.height)

    @property
    def frames(self) -> int:
        return cast(int, self.request.frames)

    @property
    def fps(self) -> float:
        return cast(float, self.request.fps)

    @property
    def steps(self) -> int:
        return cast(int, self.request.steps)

    @property
    def guidance(self) -> float:
        return cast(float, self.request.guidance)

    @property
    def guided(self) -> bool:
        """Whether a second, unconditional forward runs; diffusers' rule: above 1."""
        return self.guidance > 1.0

    @property
    def T(self) -> int:  # noqa: N802
        return (self.frames - 1) // 4 + 1

    @property
    def Y(self) -> int:  # noqa: N802
        return self.height // 8

    @property
    def X(self) -> int:  # noqa: N802
        return self.width // 8

    @property
    def A(self) -> int:  # noqa: N802
        return audio_latents(self.frames, self.fps) if self.request.audio else 0

    @property
    def samples(self) -> int:
        """Audio samples that last as long as the picture, to the nearest sample."""
        return round(self.frames / self.fps * AUDIO_RATE)

    def key(self) -> tuple[Any, ...]:
        """What must agree for two requests to share one batch."""
        r = asdict(replace(self.request, image=None, prompt="x", negative=None, seed=None))
        return (*sorted(r.items()), self.request.image is not None)


def audio_latents(frames: int, fps: float) -> int:
    """Audio latents for `frames` pictures at `fps`: ceil(frames / fps * 44100 / 1024), as diffusers computes it."""
    return math.ceil(frames / fps * AUDIO_RATE / SAMPLES_PER_AUDIO_LATENT)


def frames_for(seconds: float, fps: float) -> int:
    """The 4k + 1 frames nearest to `seconds`; one at least."""
    return max(4 * round((seconds * fps - 1) / 4) + 1, 1)


def changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Fields of a request with some replaced; a length in seconds takes the place of one in frames, and the reverse."""
    other = {"frames": "seconds", "seconds": "frames"}
    dropped = {other[name] for name in changes if name in other}
    return {name: value for name, value in values.items() if name not in dropped} | changes


def _check_text(name: str, value: object, what: str = "a text") -> None:
    if not isinstance(value, str):
        raise RequestError(name, value, what)
    if len(value) > MAX_PROMPT_CHARACTERS:
        raise RequestError(name, value, f"at most {MAX_PROMPT_CHARACTERS} characters; this one has {len(value)}")
    if "\x00" in value:
        raise RequestError(name, value, f"{what} without NUL characters")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(name, value, f"{what} that can be written as UTF-8") from None


def _plain(value: Any) -> Any:
    """Numbers of other libraries as Python's own, since a report has to be JSON; everything else as it is."""
    if type(value).__name__ == "bool" and type(value).__module__ == "numpy":
        return bool(value)
    if isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _check_image(value: object) -> None:
    if value is None or isinstance(value, bytes):
        return
    if isinstance(value, str | Path):
        _check_text("image", str(value), "a path")
        return
    # Who has a PIL image has imported Pillow; a request itself does without it.
    pillow = sys.modules.get("PIL.Image")
    if pillow is None or not isinstance(value, pillow.Image):
        raise RequestError("image", value, "a path, the bytes of an image file, or a PIL image")


def _check_int(name: str, value: object, low: int, high: int, *, or_none: bool = True) -> None:
    if value is None and or_none:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(name, value, f"a whole number from {low} to {high}")


def _check_real(name: str, value: object, low: float, high: float) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise RequestError(name, value, f"a number from {low:g} to {high:g}")


def _nearest(name: str, known: set[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, sorted(known), n=1)
    return (
        f"no such field; did you mean {close[0]}?" if close else "no such field; known are " + ", ".join(sorted(known))
    )
