"""Images as users have them, made into plain RGB of the size asked for. Nothing is decoded before its size is known."""

from __future__ import annotations

import io
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps

from diptych.errors import MediaError
from diptych.request import Fit

MAX_PIXELS = 80_000_000
"""Pixels of an image that is taken, and of any intermediate step of fitting it."""
FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM")
"""What is read. The list is closed: some of Pillow's other readers start programs or decode what they like."""

_ACCEPTED = "give a whole " + ", ".join(FORMATS[:-1]) + f" or {FORMATS[-1]} file of at most 80 megapixels"


def load_image(source: str | Path | bytes | Image.Image) -> Image.Image:
    """An RGB image, upright, of a path, the bytes of an image file, or a PIL image (which is left as it is).

    The EXIF orientation is applied; transparency is laid on white, as a page would; 16-bit grey is scaled to 8 bits;
    an animation gives its first frame; palettes, CMYK and grey are converted.
    Raises `MediaError` for what is missing, no image, cut short or larger than `MAX_PIXELS`: before it is decoded.
    """
    if isinstance(source, Image.Image):
        _check_size(source, "image")
        return _to_rgb(source, "image")
    name = f"image of {len(source):,} bytes" if isinstance(source, bytes) else f"image {source}"
    # A file is read as the decoder asks for it: one that is no image is not read into memory, however long it is.
    with _opened(source) as data:
        try:
            image = Image.open(data, formats=FORMATS)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise MediaError(f"{name} cannot be used: it is far too large; {_ACCEPTED}.") from None
        except Exception as error:  # Pillow's readers raise anything at all on bytes that are no image
            raise MediaError(f"{name} cannot be used: it is not an image; {_ACCEPTED}.") from error
        with image:
            _check_size(image, name)
            return _to_rgb(image, name)


def fit_image(image: Image.Image, width: int, height: int, fit: Fit = "crop") -> Image.Image:
    """`image` (RGB) in width x height pixels, resampled by Lanczos.

    crop: cover the frame and cut what hangs over, evenly, to the pixel what diffusers does; pad: all of the image,
    centred, on black; stretch: each side on its own.
    Raises `MediaError` when covering the frame would take more than `MAX_PIXELS`.
    """
    if fit == "stretch":
        return image.resize((width, height), Image.Resampling.LANCZOS)
    wide = image.width * height > width * image.height
    if wide == (fit == "crop"):  # the height decides
        size = (image.width * height // image.height, height)
    else:
        size = (width, image.height * width // image.width)
    size = (max(size[0], 1), max(size[1], 1))
    if size[0] * size[1] > MAX_PIXELS:
        raise MediaError(
            f"image of {image.width}x{image.height} cannot be cropped to {width}x{height}: the shapes differ too much; "
            "ask for fit = pad or stretch, or crop it yourself."
        )
    scaled = image.resize(size, Image.Resampling.LANCZOS)
    framed = Image.new("RGB", (width, height))
    framed.paste(scaled, (width // 2 - size[0] // 2, height // 2 - size[1] // 2))
    return framed


def _opened(source: str | Path | bytes) -> BinaryIO:
    if isinstance(source, bytes):
        return io.BytesIO(source)
    path = Path(source)
    try:
        if not path.is_file():
            what = "it is not a regular file" if path.exists() else "there is no such file"
            raise MediaError(f"image {source} cannot be used: {what}; {_ACCEPTED}.")
        return path.open("rb")
    except OSError as error:
        raise MediaError(f"image {source} cannot be read: {(error.strerror or str(error)).lower()}.") from error


def _check_size(image: Image.Image, name: str) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise MediaError(f"{name} cannot be used: it has {width}x{height} pixels; at most {MAX_PIXELS:,} are taken.")
    if not width or not height:
        raise MediaError(f"{name} cannot be used: it has no pixels.")


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    try:
        image.load()
    except Exception as error:  # as above
        raise MediaError(f"{name} cannot be used: it is damaged or cut short; {_ACCEPTED}.") from error
    image = _upright(image)
    if image.mode.startswith("I"):
        # Pillow clips 16-bit grey when it converts; 257 = 65535 / 255.
        levels = np.asarray(image).astype(np.float64) / 257
        image = Image.fromarray(levels.round().clip(0, 255).astype(np.uint8))
    elif image.mode == "F":
        raise MediaError(f"{name} cannot be used: its values are floating-point; save it with 8 or 16 bits a channel.")
    elif image.mode == "La":
        image = image.convert("LA")  # the only way out of it that Pillow has
    if image.has_transparency_data:
        colours = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", colours.size, "white"), colours)
    return image.convert("RGB")


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # broken EXIF is common and says nothing about the pixels
        return image
