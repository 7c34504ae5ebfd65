"""From typed fields to the one normalised request that is stored, shown, replayed and run."""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
from typing import Any

from diptych.errors import RequestError
from diptych.request import ClipDefaults, ClipRequest
from diptych.server.api.reference import Reference
from diptych.server.problems import Problem, from_request_error, invalid
from diptych.server.settings import Settings

CRF = {"maximum": 12, "high": 16, "default": 18, "medium": 23, "low": 28}
TRAINED_SECONDS = 5.1
_SHAPES = ({"size"}, {"width", "height"})
_LENGTHS = ({"seconds"}, {"num_frames"})
_EXACTNESS = ({"quality"}, {"enable_cache_dit"})

Spec = dict[str, Any]
"""What a job stores: every parameter as it will be run; JSON."""


def normalise(
    given: dict[str, Any], ignored: list[str], image: Reference | None, defaults: ClipDefaults, settings: Settings
) -> Spec:
    """Fill, round and check. Raises `Problem` 400 naming the field. Seeds that were not given stay None here."""
    _check_features(given, settings)
    cache = _cache(given, settings)
    width, height = _shape(given, image, defaults)
    fps = given.get("fps", defaults.fps)
    outputs = given.get("n", 1)
    if outputs > settings.max_outputs:
        raise invalid("n", outputs, f"a whole number from 1 to {settings.max_outputs}")
    if defaults.distilled and "negative_prompt" in given:
        ignored = sorted([*ignored, "negative_prompt"])
    spec: Spec = {
        "prompt": given["prompt"] if "prompt" in given else _missing("prompt"),
        "model": _model(given, settings),
        "width": width,
        "height": height,
        "num_frames": _frames(given, fps, defaults.frames),
        "fps": float(fps),
        "num_inference_steps": given.get("num_inference_steps", defaults.steps),
        "guidance_scale": float(given.get("guidance_scale", defaults.guidance)),
        "negative_prompt": None if defaults.distilled else given.get("negative_prompt"),
        "seeds": _seeds(given.get("seed"), outputs),
        "n": outputs,
        "sample_audio": given.get("sample_audio", defaults.has_audio),
        "audio_normalization": given.get("audio_normalization", "clip"),
        "reference_fit": given.get("reference_fit", "crop"),
        "quality": _quality(given, settings, cache),
        "max_sequence_length": given.get("max_sequence_length", 1024),
        "crf": _crf(given),
        "x264_preset": given.get("x264_preset", "veryfast"),
        "user": given.get("user"),
        "return_stage_metrics": given.get("return_stage_metrics", False),
        "image": image.digest if image else None,
        "ignored_params": ignored,
        "warnings": [],
    }
    if settings.precision != "exact":
        spec["warnings"].append("precision_fp8")
    if settings.text_precision != "exact":
        spec["warnings"].append(f"text_precision_{settings.text_precision}")
    if cache is not None:  # a key only where it says something: requests of before it keep their digest
        spec |= {"cache": cache, "warnings": [*spec["warnings"], "step_cache"]}
    _check_scheme(given, image)
    _check_work(spec, settings)
    try:
        resolved = ClipRequest(**engine_fields(spec), image=image.data if image else None).resolve(defaults)
    except RequestError as error:
        raise from_request_error(error) from None
    spec["num_frames"] = resolved.frames
    if width * height > 414_720 or resolved.frames / fps > TRAINED_SECONDS:
        spec["warnings"].append("outside_trained_shape")
    return spec


def engine_fields(spec: Spec) -> dict[str, Any]:
    """The fields of `ClipRequest`, without image and seed."""
    return {
        "prompt": spec["prompt"],
        "negative": spec["negative_prompt"],
        "fit": spec["reference_fit"],
        "width": spec["width"],
        "height": spec["height"],
        "frames": spec["num_frames"],
        "fps": spec["fps"],
        "steps": spec["num_inference_steps"],
        "guidance": spec["guidance_scale"],
        "audio": spec["sample_audio"],
        "audio_level": spec["audio_normalization"],
        "max_text_tokens": spec["max_sequence_length"],
    }


def digest(spec: Spec, *more: str) -> str:
    """What two requests under one Idempotency-Key must share."""
    return hashlib.sha256(json.dumps([spec, *more], sort_keys=True).encode()).hexdigest()


def draw_seeds(spec: Spec) -> Spec:
    """Seeds for a request that gave none; below 2**32, so that any client's numbers hold them."""
    if spec["seeds"] is not None:
        return spec
    first = secrets.randbelow(2**32 - spec["n"])
    return spec | {"seeds": [first + i for i in range(spec["n"])]}


def remix_fields(source: Spec, changes: dict[str, Any]) -> dict[str, Any]:
    """The fields that make `source` again, with `changes` over them; what a change contradicts is dropped."""
    kept = {
        k: source[k]
        for k in (
            "prompt", "width", "height", "num_frames", "fps", "num_inference_steps", "guidance_scale",
            "negative_prompt", "n", "sample_audio", "audio_normalization", "reference_fit", "quality",
            "max_sequence_length", "x264_preset",
        )
        if source[k] is not None
    }  # fmt: skip
    kept["seed"] = list(source["seeds"])
    kept["crf"] = source["crf"]
    if source["quality"] == "high":
        kept["enable_cache_dit"] = source.get("cache") is not None
    for group in (_SHAPES, _LENGTHS, _EXACTNESS):
        if any(changes.keys() & names for names in group):
            for names in group:
                kept = {k: v for k, v in kept.items() if k not in names}
    if "output_quality" in changes:
        del kept["crf"]
    if "n" in changes and "seed" not in changes:
        kept["seed"] = source["seeds"][0]
    return kept | changes


def _missing(name: str) -> Any:
    raise Problem(400, "invalid_value", f"{name} is missing: say in words what the clip should show.", name)


def _check_features(given: dict[str, Any], settings: Settings) -> None:
    caches = bool(settings.cache)
    for name, what, loaded in (
        ("enhance_prompt", "a prompt expander", False),
        ("enable_cache_dit", "a step cache", caches),
    ):
        if given.get(name) and not loaded:
            raise Problem(400, "feature_not_enabled", f"{name} needs {what}, which this server has not loaded.", name)
    if given.get("lora"):
        inner = set(given["lora"])
        if "path" in inner:
            raise Problem(400, "path_not_allowed", "lora.path is not accepted: clients name no files.", "lora")
        raise Problem(400, "feature_not_enabled", "lora needs an adapter, and this server has loaded none.", "lora")


def _cache(given: dict[str, Any], settings: Settings) -> str | None:
    """The server's step cache, if this job may use it: only `quality` high may, and only by being asked for."""
    asked = given.get("enable_cache_dit", given.get("quality") == "high")
    if not (asked and settings.cache):
        return None
    if given.get("quality", "high") != "high":
        text = "high, since enable_cache_dit is on, or leave one of them out"
        raise invalid("quality", given["quality"], text, "conflicting_parameters")
    return settings.cache


def _quality(given: dict[str, Any], settings: Settings, cache: str | None) -> str:
    """What was asked for, unless something approximates: then only `high` is honest."""
    approximate = [] if settings.precision == "exact" else [settings.precision]
    approximate += [] if settings.text_precision == "exact" else [f"text precision {settings.text_precision}"]
    if not approximate:
        return str(given.get("quality", "lossless" if cache is None else "high"))
    if given.get("quality", "high") != "high":
        text = f"this server computes in {' and '.join(approximate)}, so only high"
        raise invalid("quality", given["quality"], text, "feature_not_enabled")
    return "high"


def _check_scheme(given: dict[str, Any], image: Reference | None) -> None:
    wanted = "tail_cond_first_frame" if image else "pretrain"
    if given.get("visual_cond_scheme", wanted) != wanted:
        why = f"{wanted}, since there is {'an' if image else 'no'} image"
        raise invalid("visual_cond_scheme", given["visual_cond_scheme"], why)


def _model(given: dict[str, Any], settings: Settings) -> str:
    shown = settings.model_names()[0]
    if given.get("model", shown) not in settings.accepted_models():
        names = ", ".join(settings.model_names())
        raise invalid("model", given["model"], f"this server runs {names}", "model_not_found")
    return shown


def _shape(given: dict[str, Any], image: Reference | None, defaults: ClipDefaults) -> tuple[int, int]:
    size = None
    if "size" in given:
        match = re.fullmatch(r"([0-9]{1,5})\s*[xX×*]\s*([0-9]{1,5})", given["size"].strip(), re.ASCII)
        if match is None:
            raise invalid("size", given["size"], "WIDTHxHEIGHT in pixels, such as 864x480")
        size = int(match[1]), int(match[2])
    if ("width" in given) != ("height" in given):
        lone = "width" if "width" in given else "height"
        raise invalid(lone, given[lone], "width and height go together", "conflicting_parameters")
    if "width" in given:
        sides = given["width"], given["height"]
        if size not in (None, sides):
            raise invalid("size", given["size"], "the same as width and height, or only one of them",
                          "conflicting_parameters")  # fmt: skip
        size = sides
    if size is None:
        return _shape_of(image, defaults) if image else (defaults.width, defaults.height)
    for side in size:
        if not 64 <= side <= 2048 or side % 16:
            raise invalid(
                "size", f"{size[0]}x{size[1]}", f"sides from 64 to 2048, multiples of 16; nearest is {_near(size)}"
            )
    return size


def _near(size: tuple[int, int]) -> str:
    return "x".join(str(min(max(round(side / 16) * 16, 64), 2048)) for side in size)


def _shape_of(image: Reference, defaults: ClipDefaults) -> tuple[int, int]:
    """The image's aspect within the checkpoint's own area; sides multiples of 16, from 64 to 2048."""
    area = defaults.width * defaults.height
    scale = math.sqrt(area / (image.width * image.height))
    while True:
        width, height = (min(max(round(side * scale / 16) * 16, 64), 2048) for side in (image.width, image.height))
        if width * height <= area or max(width, height) == 64:
            return width, height
        scale *= 0.99


def _frames(given: dict[str, Any], fps: float, default: int) -> int:
    """Frames asked for, by number or by seconds, on the grid 4k + 1."""
    asked = given.get("num_frames")
    if "seconds" in given:
        seconds = given["seconds"]
        if not 0 < seconds <= 509:
            raise invalid("seconds", seconds, "seconds above 0, of at most 509 frames")
        from_seconds = round(seconds * fps)
        if asked is not None and abs(asked - from_seconds) > 2:
            text = f"num_frames that last as long ({from_seconds}), or only one of them"
            raise invalid("seconds", seconds, text, "conflicting_parameters")
        asked = from_seconds if asked is None else asked
        if not 4 <= asked <= 512:
            raise invalid("seconds", seconds, f"from 5 to 509 frames; at {fps:g} fps that is {asked}")
    asked = default if asked is None else asked
    return min(max(int(asked) // 4 * 4 + 1, 5), 509)


def _seeds(seed: int | list[int] | None, outputs: int) -> list[int] | None:
    if seed is None:
        return None
    if isinstance(seed, int):
        if seed + outputs - 1 >= 2**63:
            raise invalid("seed", seed, "a whole number from 0 to 9223372036854775807 for each output")
        return [seed + i for i in range(outputs)]
    if len(seed) != outputs:
        raise invalid("seed", seed, f"one whole number, or a list of n = {outputs}")
    return seed


def _crf(given: dict[str, Any]) -> int:
    if "output_compression" in given:
        return round(int(given["output_compression"]) * 51 / 100)
    crf: int = given.get("crf", CRF[given.get("output_quality", "default")])
    return crf


def _check_work(spec: Spec, settings: Settings) -> None:
    frames = (spec["num_frames"] - 1) // 4 + 1
    tokens = frames * (spec["width"] // 16) * (spec["height"] // 16)
    if tokens > settings.max_video_tokens:
        shown = f"{spec['width']}x{spec['height']}, {spec['num_frames']} frames"
        raise invalid("size", shown, f"at most {settings.max_video_tokens} video tokens, and this has {tokens}")
    steps = spec["num_inference_steps"]
    if steps > settings.max_steps:
        raise invalid("num_inference_steps", steps, f"a whole number from 1 to {settings.max_steps}")
    work = tokens * steps * spec["n"]
    if settings.max_work and work > settings.max_work:
        raise invalid("num_inference_steps", steps, f"work of at most {settings.max_work} token steps; this is {work}")
