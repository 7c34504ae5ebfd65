"""The reference image of a request: from a file part, a data: URL or an allow-listed https address, checked as data."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import threading
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from PIL import Image

from diptych.errors import MediaError
from diptych.media.images import load_image
from diptych.server.api.fetch import fetch
from diptych.server.api.forms import Body
from diptych.server.problems import Problem
from diptych.server.settings import Settings

FORMATS = ("JPEG", "PNG", "WEBP")
_PARTS = ("input_reference", "input_reference[]", "input_references", "input_references[]", "image_reference")
_decoding = threading.BoundedSemaphore(2)
"""A 64-megapixel image takes hundreds of MiB while it is decoded: not all clients at once."""


@dataclass(frozen=True)
class Reference:
    """The bytes of an image that decodes, with its upright size in pixels."""

    data: bytes
    width: int
    height: int

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def read_reference(body: Body, value: Any, settings: Settings) -> Reference | None:
    """The one image of a request, or None. `value`: the field `input_reference`, if it is no file.

    Raises `Problem`: 400 for two images, another form or a file that is no image, 413 for one beyond the limits.
    """
    parts = []
    for name, content in body.files:
        if name not in _PARTS:
            raise Problem(400, "unknown_parameter", f"{name!r} takes no file; send one input_reference.", name)
        parts.append(content)
    if len(parts) > 1:
        raise Problem(400, "conflicting_parameters", "input_reference takes exactly one image.", "input_reference")
    if parts and value is not None:
        text = "input_reference is given both as a file and as text: give one."
        raise Problem(400, "conflicting_parameters", text, "input_reference")
    limit = settings.max_image_mib << 20
    if parts:
        data = parts[0].read(limit + 1)
    elif value is not None:
        data = _from_value(value, settings, limit)
    else:
        return None
    if len(data) > limit:
        raise too_large(f"The image is larger than {settings.max_image_mib} MiB.")
    return check_image(data, settings)


def check_image(data: bytes, settings: Settings) -> Reference:
    """Decode an image once, after its size is known. Raises `Problem`."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
    except Image.DecompressionBombError:
        raise too_large(f"The image is too large; at most {settings.max_image_megapixels} megapixels.") from None
    except Exception:  # Pillow's readers raise anything at all on bytes that are no image
        raise _bad("input_reference is no JPEG, PNG or WebP image.") from None
    if width * height > settings.max_image_megapixels * 1_000_000:
        raise too_large(f"The image has {width}x{height} pixels; at most {settings.max_image_megapixels} megapixels.")
    try:
        with _decoding:
            upright = load_image(data)
    except MediaError:
        raise _bad("input_reference is damaged or cut short: send a whole JPEG, PNG or WebP image.") from None
    return Reference(data, upright.width, upright.height)


def too_large(message: str) -> Problem:
    return Problem(413, "request_too_large", message, "input_reference")


def _bad(message: str, code: str = "invalid_value") -> Problem:
    return Problem(400, code, message, "input_reference")


def _from_value(value: Any, settings: Settings, limit: int) -> bytes:
    if isinstance(value, list):
        if len(value) != 1:
            raise _bad("input_reference takes exactly one image.", "conflicting_parameters")
        value = value[0]
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise _bad("input_reference is neither a URL nor JSON that can be read.") from None
    if isinstance(value, dict):
        if "file_id" in value:
            raise _bad("input_reference.file_id is not supported: this server keeps no files.", "file_id_not_supported")
        unknown = sorted(set(value) - {"image_url", "type"})
        if unknown or "image_url" not in value:
            raise _bad("input_reference takes a file, a data: URL, or an object with image_url.")
        value = value["image_url"]
        if isinstance(value, dict):
            value = value.get("url")
    if not isinstance(value, str):
        raise _bad("input_reference takes a file, a data: URL, or an object with image_url.")
    return _from_url(value.strip(), settings, limit)


def _from_url(url: str, settings: Settings, limit: int) -> bytes:
    scheme = url[:8].lower()
    if scheme.startswith("data:"):
        return _from_data_url(url, limit)
    if scheme.startswith(("http:", "https:")):
        try:
            host = urlsplit(url).hostname
        except ValueError:
            host = None
        if host not in settings.allowed_media_domains or not scheme.startswith("https:"):
            shown = repr((host or url)[:80])
            text = f"input_reference may not be fetched from {shown}: upload the image, or send a data: URL."
            raise _bad(text, "url_not_allowed")
        return fetch(url, frozenset(settings.allowed_media_domains), limit)
    raise _bad(
        "input_reference takes a file or a data: URL; a path or another address is not read.", "path_not_allowed"
    )


def _from_data_url(url: str, limit: int) -> bytes:
    head, comma, payload = url.partition(",")
    if not comma or not head.lower().startswith("data:image/"):
        raise _bad("input_reference is no data:image/...;base64, URL.")
    if len(payload) > limit * 3 // 2:
        raise too_large("The image is too large.")
    try:
        if head.lower().endswith(";base64"):
            return base64.b64decode(payload, validate=True)
        return unquote_to_bytes(payload)
    except (binascii.Error, ValueError):
        raise _bad("input_reference holds base64 that cannot be read.") from None
