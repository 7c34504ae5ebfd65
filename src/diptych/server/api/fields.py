"""Every field of a create request: its type and its limits. The OpenAPI schema is drawn from the same table."""

from __future__ import annotations

import difflib
import json
import math
import re
from dataclasses import dataclass
from typing import Any

from diptych.server.problems import Problem, invalid

WRAPPERS = ("extra_body", "extra_json", "extra_params", "video_params")
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")


@dataclass(frozen=True)
class Field:
    """One field. `kind`: text, integer, real, flag, choice, object, seeds, reference or seconds."""

    name: str
    kind: str
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    def schema(self) -> dict[str, Any]:
        types: dict[str, Any] = {
            "text": {"type": "string"},
            "integer": {"type": "integer"},
            "real": {"type": "number"},
            "flag": {"type": "boolean"},
            "choice": {"type": "string", "enum": list(self.choices)},
            "object": {"type": "object"},
            "seeds": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]},
            "reference": {"anyOf": [{"type": "string"}, {"type": "object"}]},
            "seconds": {"anyOf": [{"type": "string"}, {"type": "number"}]},
        }
        schema = {**types[self.kind], "description": self.help}
        if self.kind in ("integer", "real"):
            schema |= {k: v for k, v in (("minimum", self.low), ("maximum", self.high)) if v is not None}
        if self.kind == "text":
            schema |= {k: int(v) for k, v in (("minLength", self.low), ("maxLength", self.high)) if v is not None}
        return schema

    def read(self, value: Any) -> Any:
        """The value in its type, from JSON or form text. Raises `Problem` 400."""
        if self.kind == "text":
            return self._text(value)
        if self.kind in ("integer", "real", "seconds"):
            return self._number(value)
        if self.kind == "flag":
            return self._flag(value)
        if self.kind == "choice":
            if value not in self.choices:
                raise invalid(self.name, value, "one of " + ", ".join(self.choices))
            return value
        if self.kind == "object":
            return as_object(self.name, value)
        if self.kind == "seeds":
            return self._seeds(value)
        return value

    def _text(self, value: Any) -> str:
        if not isinstance(value, str):
            raise invalid(self.name, value, "a text")
        if len(value) < (self.low or 0) or len(value) > (self.high or math.inf):
            raise invalid(self.name, value, f"from {int(self.low or 0)} to {int(self.high or 0)} characters")
        return value

    def _number(self, value: Any) -> float | int:
        whole = self.kind == "integer"
        wanted = f"a {'whole ' * whole}number" + (
            f" from {self.low:g} to {self.high:g}" if self.low is not None and self.high is not None else ""
        )
        number: Any = value
        if isinstance(value, str):
            text = value.strip()
            if _INTEGER.fullmatch(text):
                number = int(text)
            else:
                try:
                    number = float(text) if len(text) <= 64 else None
                except ValueError:
                    number = None
        if isinstance(number, bool) or not isinstance(number, int | float) or not _finite(number):
            raise invalid(self.name, value, wanted)
        if whole:
            if number != int(number):
                raise invalid(self.name, value, wanted)
            number = int(number)
        if (self.low is not None and number < self.low) or (self.high is not None and number > self.high):
            raise invalid(self.name, value, wanted)
        return number if whole or self.kind == "seconds" else float(number)

    def _flag(self, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        known = {"true": True, "1": True, "false": False, "0": False}
        if isinstance(value, str) and value.lower() in known:
            return known[value.lower()]
        raise invalid(self.name, value, "true or false")

    def _seeds(self, value: Any) -> int | list[int]:
        one = Field(self.name, "integer", "", 0, 2**63 - 1)
        if isinstance(value, str) and value.strip().startswith("["):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise invalid(self.name, value, "a whole number, or a JSON list of them") from None
        if isinstance(value, list):
            return [int(one.exact(v)) for v in value]
        return int(one.exact(value))

    def exact(self, value: Any) -> int:
        """A whole number of up to 64 bits: floats would round it."""
        if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
            value = int(value)
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
            raise invalid(self.name, value, "a whole number from 0 to 9223372036854775807")
        return value


def _finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def as_object(name: str, value: Any) -> dict[str, Any]:
    """An object, or JSON text of one. Raises `Problem`."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise invalid(name, value, "an object, or JSON text of one") from None
    if not isinstance(value, dict):
        raise invalid(name, value, "an object, or JSON text of one")
    return value


FIELDS = {
    f.name: f
    for f in (
        Field("prompt", "text", "What the clip shows and sounds like.", 1, 32_000),
        Field("model", "text", "A name from /v1/models.", 1, 512),
        Field("size", "text", "WIDTHxHEIGHT in pixels, such as 864x480.", 1, 32),
        Field("width", "integer", "Pixels, a multiple of 16; with height.", 64, 2048),
        Field("height", "integer", "Pixels, a multiple of 16; with width.", 64, 2048),
        Field("seconds", "seconds", "Length; the frames drawn are the 4k + 1 that fit it."),
        Field("num_frames", "integer", "Frames; rounded to 4k + 1.", 5, 509),
        Field("fps", "real", "Frames a second.", 1, 60),
        Field("num_inference_steps", "integer", "Denoising steps.", 1, 200),
        Field("guidance_scale", "real", "1 switches guidance off; distilled checkpoints take only 1.", 0, 20),
        Field("negative_prompt", "text", "What to steer away from.", 0, 8_000),
        Field("seed", "seeds", "Whole number, or a list of one for each output; drawn and told if absent."),
        Field("n", "integer", "Clips to make, with seeds seed, seed + 1, ...", 1, 10,
              aliases=("num_outputs_per_prompt",)),
        Field("sample_audio", "flag", "Whether the clip has sound.", aliases=("generate_sound",)),
        Field("audio_normalization", "choice", "clip: as decoded; normalize: peak at full scale.",
              choices=("clip", "normalize")),
        Field("visual_cond_scheme", "choice", "Follows from the image.", choices=("pretrain", "tail_cond_first_frame")),
        Field("reference_fit", "choice", "How an image of another shape is fitted.",
              choices=("crop", "pad", "stretch")),
        Field("enhance_prompt", "flag", "Needs a prompt expander.", aliases=("expand_prompts",)),
        Field("quality", "choice", "Only high allows an approximation: the step cache of a server that has one.",
              choices=("exact", "lossless", "extra-high", "high")),
        Field("enable_cache_dit", "flag", "The server's step cache for this job; needs one."),
        Field("max_sequence_length", "integer", "Text tokens; longer text is cut.", 1, 1024),
        Field("output_quality", "choice", "H.264 quality: CRF 12, 16, 18, 23 or 28.",
              choices=("maximum", "high", "default", "medium", "low")),
        Field("output_compression", "integer", "0 (best) to 100; overrides output_quality.", 0, 100),
        Field("x264_preset", "choice", "Encoding speed.",
              choices=("ultrafast", "superfast", "veryfast", "faster", "fast", "medium", "slow")),
        Field("lora", "object", "Needs an adapter loaded at start."),
        Field("user", "text", "Stored only.", 0, 256),
        Field("return_stage_metrics", "flag", "Fills metrics in the job."),
        Field("input_reference", "reference", "First frame: a file, a data: URL, or {image_url}.",
              aliases=("input_references", "reference_url", "image_reference")),
    )
}  # fmt: skip
ALIASES = {alias: f.name for f in FIELDS.values() for alias in f.aliases}

IGNORED = frozenset(
    [
        "aspect_ratio",
        "short_edge",
        "start_time_seconds",
        "guidance_scale_2",
        "true_cfg_scale",
        "boundary_ratio",
        "flow_shift",
        "sound_duration",
        "enable_frame_interpolation",
        "frame_interpolation_exp",
        "frame_interpolation_scale",
        "streaming_pacing",
        "streaming_buffer_seconds",
        "video_codec_options",
        "preencode_mp4",
        "preencode_batch_frames",
        "generator_device",
        "task_type",
        "enable_teacache",
        "enable_upscaling",
        "upscaling_scale",
        "cfg_gate_step",
        "attention_backend_override",
        "skip_softmax_params",
        "use_diffusion_decoder",
        "diffusers_kwargs",
        "profile",
        "num_profiled_timesteps",
        "profile_all_stages",
        "cache_dit_params",
    ]
)
"""Peers' fields without a meaning for this model: accepted, and named in `ignored_params`."""

REFUSED = {
    **dict.fromkeys(
        ("output_path", "perf_dump_path", "video_path", "upscaling_model_path", "frame_interpolation_model_path",
         "image_path", "model_path"),
        ("path_not_allowed", "names a file of the server, which no client may"),
    ),
    **dict.fromkeys(
        ("video_reference", "sr_resolution_scale", "sr_target_resolution", "sr_target_resize_mode",
         "sr_tile_min_overlap", "sr_tiles_batch_size"),
        ("unsupported_input", "needs a super-resolution checkpoint, which this server has not loaded"),
    ),
    **dict.fromkeys(
        ("timeline_guides", "guide_files", "audio_reference"), ("unsupported_input", "is no input of this model")
    ),
}  # fmt: skip
_REFUSED_SHAPE = re.compile(r"(control|source)_\w+|\w+_noise_mask")


def flatten(values: dict[str, Any]) -> dict[str, Any]:
    """Unwrap `extra_body`, `extra_json`, `extra_params` and `video_params`; the top level wins, then this order."""
    found = {k: v for k, v in values.items() if k not in WRAPPERS}
    for wrapper in WRAPPERS:
        if values.get(wrapper) is None:
            continue
        inner = flatten(as_object(wrapper, values[wrapper]))
        found = inner | found
    return found


def read_fields(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Typed values by canonical name, and the fields accepted without effect. Raises `Problem` for any other name."""
    found: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in flatten(values).items():
        if value is None:
            continue
        known = ALIASES.get(name, name)
        if known in FIELDS:
            typed = FIELDS[known].read(value)
            if known in found and (known == "input_reference" or found[known] != typed):
                raise Problem(400, "conflicting_parameters", f"{name} and another name of {known} differ.", name)
            found[known] = typed
        elif name in IGNORED:
            if value not in (False, "false", "", [], {}, 0, "0"):
                ignored.append(name)
        elif name in REFUSED or _REFUSED_SHAPE.fullmatch(name):
            code, why = REFUSED.get(name, ("unsupported_input", "is no input of this model"))
            raise Problem(400, code, f"{name} {why}.", name)
        else:
            raise _unknown(name)
    return found, sorted(ignored)


def _unknown(name: str) -> Problem:
    near = difflib.get_close_matches(name, sorted({*FIELDS, *ALIASES, *IGNORED}), n=1)
    hint = f"did you mean {near[0]}?" if near else "see /docs for the known ones."
    return Problem(400, "unknown_parameter", f"{name[:64]!r} is no field of this request: {hint}", name[:64])
