"""Images: what a camera, a browser or a joker may hand over, and how it is fitted."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from diffusers.image_processor import VaeImageProcessor
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from diptych.errors import MediaError
from diptych.media.images import MAX_PIXELS, fit_image, load_image

RNG = np.random.default_rng(0)
PHOTO = Image.fromarray(RNG.integers(0, 256, (60, 90, 3), dtype=np.uint8))


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_header(width, height):
    """A PNG that says how large it is, and holds next to nothing."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_paths_bytes_and_images_give_the_same(tmp_path):
    path = tmp_path / "photo.png"
    PHOTO.save(path)
    for source in (path, str(path), path.read_bytes(), PHOTO):
        image = load_image(source)
        assert image.mode == "RGB"
        assert np.array_equal(np.asarray(image), np.asarray(PHOTO))


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "AVIF", "BMP", "TIFF", "GIF", "PPM"])
def test_every_listed_format_is_read(kind):
    smooth = Image.new("RGB", (32, 16), (180, 60, 30))
    image = load_image(encoded(smooth, kind))
    assert image.size == (32, 16)
    assert np.abs(np.asarray(image, dtype=int) - (180, 60, 30)).max() < 16


def test_the_camera_was_held_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise
    image = load_image(encoded(PHOTO, "PNG", exif=exif))
    assert np.array_equal(np.asarray(image), np.rot90(np.asarray(PHOTO), -1))


def test_broken_exif_leaves_the_image_as_it_is():
    assert load_image(encoded(PHOTO, "PNG", exif=b"Exif\x00\x00MM\x00*\x00\x00")).size == PHOTO.size


def test_transparency_is_laid_on_white():
    clear = Image.new("RGBA", (4, 4), (200, 0, 0, 0))
    clear.putpixel((0, 0), (200, 0, 0, 255))
    clear.putpixel((1, 0), (200, 0, 0, 128))
    for source in (encoded(clear), encoded(clear, "WEBP", lossless=True), clear):
        image = load_image(source)
        assert image.getpixel((0, 0)) == (200, 0, 0)
        assert image.getpixel((1, 0)) == pytest.approx((227, 127, 127), abs=1)
        assert image.getpixel((3, 3)) == (255, 255, 255)
    grey = Image.new("LA", (2, 2), (10, 0))
    assert load_image(encoded(grey)).getpixel((0, 0)) == (255, 255, 255)


def test_a_transparent_palette_is_laid_on_white():
    palette = Image.new("P", (2, 1))
    palette.putpalette([0, 0, 0, 250, 0, 0])
    palette.putpixel((1, 0), 1)
    image = load_image(encoded(palette, "PNG", transparency=0))
    assert [image.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (250, 0, 0)]


def test_sixteen_bits_are_scaled_not_clipped():
    grey = Image.fromarray(np.array([[0, 257 * 100, 257 * 200, 65535]], dtype=np.uint16))
    for kind in ("PNG", "TIFF"):
        image = load_image(encoded(grey, kind))
        assert [image.getpixel((x, 0))[0] for x in range(4)] == [0, 100, 200, 255]


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "LAB", "HSV"])
def test_other_colour_modes_become_rgb(mode):
    image = load_image(PHOTO.convert(mode) if mode != "LAB" else Image.new("LAB", PHOTO.size))
    assert image.mode == "RGB"
    assert image.size == PHOTO.size


def test_a_cmyk_jpeg_keeps_its_colours():
    ink = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    red, green, blue = load_image(encoded(ink, "JPEG")).getpixel((8, 8))
    assert red > 200
    assert green < 60
    assert blue < 60


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_gives_its_first_frame(kind):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((250, 0, 0), (0, 250, 0))]
    image = load_image(encoded(frames[0], kind, save_all=True, append_images=frames[1:]))
    assert image.getpixel((4, 4))[0] > 200


def test_an_image_that_was_handed_over_is_left_as_it_is():
    exif = Image.Exif()
    exif[0x0112] = 6
    mine = Image.open(io.BytesIO(encoded(PHOTO, "PNG", exif=exif)))
    load_image(mine)
    assert mine.size == PHOTO.size


NOISE = Image.fromarray(RNG.integers(0, 256, (100, 300, 3), dtype=np.uint8))
BAD = {
    "not an image.*PNG, JPEG": b"hello" * 100,
    "image of 0 bytes.*not an image": b"",
    "damaged or cut short": encoded(PHOTO)[:2000],
    "image of 9,0.*damaged": encoded(Image.fromarray(RNG.integers(0, 256, (100, 300, 3), dtype=np.uint8)), "PPM")[
        :9000
    ],
    "far too large": png_header(40_000, 25_000),
    "10001x8000 pixels; at most 80,000,000": png_header(10_001, 8_000),
    "floating-point": encoded(Image.new("F", (4, 4)), "TIFF"),
}


@pytest.mark.parametrize("words", BAD)
def test_what_is_no_image_is_one_sentence(words):
    with pytest.raises(MediaError, match=words) as refusal:
        load_image(BAD[words])
    assert str(refusal.value).count(". ") == 0


def test_a_billion_pixels_are_refused_before_they_are_decoded(tmp_path):
    import tracemalloc

    tracemalloc.start()
    with pytest.raises(MediaError):
        load_image(png_header(31_623, 31_623))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    with pytest.raises(MediaError, match="at most 80,000,000"):
        load_image(Image.new("1", (MAX_PIXELS // 8000 + 1, 8000)))


def test_a_program_is_not_an_image(tmp_path):
    script = tmp_path / "script.eps"
    script.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")
    with pytest.raises(MediaError, match="not an image"):
        load_image(script)


def test_a_path_that_leads_nowhere_is_one_sentence(tmp_path):
    for path, words in (
        (tmp_path / "none.png", "no such file"),
        (tmp_path, "not a regular file"),
        ("/dev/zero", "not a regular file"),
        ("https://example.org/cat.png", "no such file"),
    ):
        with pytest.raises(MediaError, match=words):
            load_image(path)


sides = st.integers(1, 200)
targets = st.integers(1, 12).map(lambda n: 16 * n)


@settings(max_examples=80, deadline=None)
@given(sides, sides, targets, targets)
def test_crop_is_diffusers_to_the_bit(w, h, width, height):
    image = Image.fromarray(np.random.default_rng(w * h).integers(0, 256, (h, w, 3), dtype=np.uint8))
    processor = VaeImageProcessor(vae_scale_factor=8)
    want = processor.preprocess(image, height=height, width=width, resize_mode="crop")
    got = np.asarray(fit_image(image, width, height), dtype=np.float32) / 255
    assert np.array_equal(2 * got.transpose(2, 0, 1)[None] - 1, want.numpy())


@settings(max_examples=40, deadline=None)
@given(sides, sides, targets, targets)
def test_pad_shows_all_of_the_image_centred_on_black(w, h, width, height):
    framed = np.asarray(fit_image(Image.new("RGB", (w, h), "white"), width, height, "pad"))
    assert framed.shape == (height, width, 3)
    rows, columns = framed.any(axis=(1, 2)), framed.any(axis=(0, 2))
    assert rows.all() or columns.all(), "one side is filled"
    scale = min(width / w, height / h)
    for lit, side in ((rows, h), (columns, w)):
        lit = np.flatnonzero(lit)
        assert len(lit) == lit[-1] - lit[0] + 1
        assert abs(len(lit) - max(side * scale, 1)) <= 1
    assert (framed[rows][:, columns] == 255).all()


def test_pad_is_centred():
    framed = np.asarray(fit_image(Image.new("RGB", (100, 50), "white"), 64, 64, "pad"))
    lit = np.flatnonzero(framed.any(axis=(1, 2)))
    assert (lit[0], lit[-1]) == (16, 47)


def test_stretch_fills_the_frame():
    want = np.asarray(PHOTO.resize((32, 64), Image.Resampling.LANCZOS))
    assert np.array_equal(np.asarray(fit_image(PHOTO, 32, 64, "stretch")), want)


def test_a_sliver_is_not_blown_up_to_gigabytes():
    sliver = Image.new("RGB", (1, 3000))
    with pytest.raises(MediaError, match=r"1x3000 cannot be cropped to 2048x16.*pad or stretch"):
        fit_image(sliver, 2048, 16)
    assert fit_image(sliver, 2048, 16, "pad").size == (2048, 16)
    assert fit_image(sliver, 2048, 16, "stretch").size == (2048, 16)


def test_a_file_that_is_no_image_is_not_read_into_memory(tmp_path):
    with (tmp_path / "endless.png").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(MediaError, match="not an image"):
        load_image(tmp_path / "endless.png")


def test_a_name_that_no_file_can_have(tmp_path):
    with pytest.raises(MediaError, match="name too long"):
        load_image("x" * 5000)


def test_every_mode_of_pillow_becomes_rgb_or_one_sentence():
    for mode in ("1", "L", "P", "RGBX", "RGBa", "CMYK", "YCbCr", "LAB", "HSV", "I", "I;16", "I;16B", "LA", "PA", "La"):
        assert load_image(Image.new(mode, (6, 4))).mode == "RGB", mode
