"""Requests that must be refused: name, what is sent, status, code, and the sentence that the user reads."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

from PIL import Image

Row = tuple[str, dict[str, Any], int, str, str]

PROMPT = {"prompt": "a lamp"}


def image(form: str, size: tuple[int, int] = (32, 32)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, "teal").save(out, form)
    return out.getvalue()


def bomb_png(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to be enormous."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")
    )


def js(**fields: Any) -> dict[str, Any]:
    return {"json": PROMPT | fields}


def raw(body: bytes | str, kind: str = "application/json") -> dict[str, Any]:
    return {"content": body, "headers": {"Content-Type": kind}}


def form(*parts: tuple[str, str | bytes], end: bytes = b"--x--\r\n", boundary: str = "x") -> dict[str, Any]:
    body = b""
    for name, value in parts:
        data = value.encode() if isinstance(value, str) else value
        body += b'--x\r\nContent-Disposition: form-data; name="' + name.encode() + b'"\r\n\r\n' + data + b"\r\n"
    return raw(body + end, f"multipart/form-data; boundary={boundary}")


def ref(data: bytes, name: str = "a.png", field: str = "input_reference") -> dict[str, Any]:
    return {"data": PROMPT, "files": [(field, (name, data))]}


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64," + base64.b64encode(data).decode()


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
PNG = image("PNG")


# fmt: off
ROWS: list[Row] = [
    ("no content type", raw(b"{}", ""), 415, "unsupported_media_type",
     "Content-Type '' is not accepted: send multipart/form-data or application/json."),
    ("urlencoded", {"data": PROMPT}, 415, "unsupported_media_type",
     "Content-Type 'application/x-www-form-urlencoded' is not accepted: send multipart/form-data or ap"
     "plication/json."),
    ("text", raw(b"hello","text/plain"), 415, "unsupported_media_type",
     "Content-Type 'text/plain' is not accepted: send multipart/form-data or application/json."),
    ("empty json body", raw(b""), 400, "invalid_json",
     "The body is not JSON that can be read: Expecting value: line 1 column 1 (char 0)."),
    ("broken json", raw('{"prompt": '), 400, "invalid_json",
     "The body is not JSON that can be read: Expecting value: line 1 column 12 (char 11)."),
    ("json list", raw('["a"]'), 400, "invalid_json",
     "The body is not a JSON object."),
    ("json text", raw('"a"'), 400, "invalid_json",
     "The body is not a JSON object."),
    ("json null", raw("null"), 400, "invalid_json",
     "The body is not a JSON object."),
    ("json nan", raw('{"prompt": "a", "fps": NaN}'), 400, "invalid_json",
     "The body is not JSON that can be read: NaN is no JSON number."),
    ("json infinity", raw('{"prompt": "a", "fps": Infinity}'), 400, "invalid_json",
     "The body is not JSON that can be read: Infinity is no JSON number."),
    ("json not utf-8", raw(b'{"prompt": "\xff\xfe"}'), 400, "invalid_json",
     "The body is not JSON that can be read: it is not UTF-8."),
    ("json utf-16", raw('{"prompt": "a"}'.encode('utf-16')), 400, "invalid_json",
     "The body is not JSON that can be read: it is not UTF-8."),
    ("json nested deep", raw('{"prompt": "a", "lora": ' + '['*100000 + ']'*100000 + '}'), 400, "invalid_json",
     "The body is not JSON that can be read: it is nested too deeply."),
    ("json field twice", raw('{"prompt": "a", "prompt": "b"}'), 400, "conflicting_parameters",
     "prompt is given twice: give it once."),
    ("json huge integer", raw('{"prompt": "a", "seed": ' + '9'*5000 + '}'), 400, "invalid_json",
     "The body is not JSON that can be read: a number has too many digits."),
    ("lone surrogate", raw('{"prompt": "\\ud800"}'), 400, "invalid_value",
     "prompt = '\\ud800' is not accepted: a text that can be written as UTF-8."),
    ("NUL in prompt", js(prompt="a\0b"), 400, "invalid_value",
     "prompt = 'a\\x00b' is not accepted: a text without NUL characters."),
    ("no prompt", {"json": {"size": "96x64"}}, 400, "invalid_value",
     "prompt is missing: say in words what the clip should show."),
    ("null prompt", {"json": {"prompt": None}}, 400, "invalid_value",
     "prompt is missing: say in words what the clip should show."),
    ("empty prompt", js(prompt=""), 400, "invalid_value",
     "prompt = '' is not accepted: from 1 to 32000 characters."),
    ("blank prompt", js(prompt="  \n "), 400, "invalid_value",
     "prompt = '  \\n ' is not accepted: say in words what the clip should show."),
    ("number as prompt", js(prompt=5), 400, "invalid_value",
     "prompt = 5 is not accepted: a text."),
    ("list as prompt", js(prompt=["a"]), 400, "invalid_value",
     "prompt = ['a'] is not accepted: a text."),
    ("huge prompt", js(prompt="a"*32001), 400, "invalid_value",
     "prompt = 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa…' is not "
     "accepted: from 1 to 32000 characters."),
    ("huge negative", js(negative_prompt="a"*8001), 400, "invalid_value",
     "negative_prompt = 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa…"
     "' is not accepted: from 0 to 8000 characters."),
    ("unknown field", js(promt="x"), 400, "unknown_parameter",
     "'promt' is no field of this request: did you mean prompt?"),
    ("unknown field near", js(num_frame=9), 400, "unknown_parameter",
     "'num_frame' is no field of this request: did you mean num_frames?"),
    ("field with odd name", js(**{"../../etc": 1}), 400, "unknown_parameter",
     "'../../etc' is no field of this request: see /docs for the known ones."),
    ("foreign model", js(model="sora-2"), 400, "model_not_found",
     "model = 'sora-2' is not accepted: this server runs fake."),
    ("model path", js(model="../../etc/passwd"), 400, "model_not_found",
     "model = '../../etc/passwd' is not accepted: this server runs fake."),
    ("size words", js(size="large"), 400, "invalid_value",
     "size = 'large' is not accepted: WIDTHxHEIGHT in pixels, such as 864x480."),
    ("size one number", js(size="96"), 400, "invalid_value",
     "size = '96' is not accepted: WIDTHxHEIGHT in pixels, such as 864x480."),
    ("size negative", js(size="-96x64"), 400, "invalid_value",
     "size = '-96x64' is not accepted: WIDTHxHEIGHT in pixels, such as 864x480."),
    ("size not multiple", js(size="100x64"), 400, "invalid_value",
     "size = '100x64' is not accepted: sides from 64 to 2048, multiples of 16; nearest is 96x64."),
    ("size zero", js(size="0x0"), 400, "invalid_value",
     "size = '0x0' is not accepted: sides from 64 to 2048, multiples of 16; nearest is 64x64."),
    ("size too large", js(size="4096x4096"), 400, "invalid_value",
     "size = '4096x4096' is not accepted: sides from 64 to 2048, multiples of 16; nearest is 2048x2048"
     "."),
    ("size huge digits", js(size="99999999999x64"), 400, "invalid_value",
     "size = '99999999999x64' is not accepted: WIDTHxHEIGHT in pixels, such as 864x480."),
    ("size arabic digits", js(size="٩٦x64"), 400, "invalid_value",
     "size = '٩٦x64' is not accepted: WIDTHxHEIGHT in pixels, such as 864x480."),
    ("width alone", js(width=96), 400, "conflicting_parameters",
     "width = 96 is not accepted: width and height go together."),
    ("size and other width", js(size="96x64", width=64, height=96), 400, "conflicting_parameters",
     "size = '96x64' is not accepted: the same as width and height, or only one of them."),
    ("width text", js(width="wide", height=64), 400, "invalid_value",
     "width = 'wide' is not accepted: a whole number from 64 to 2048."),
    ("frames too few", js(num_frames=4), 400, "invalid_value",
     "num_frames = 4 is not accepted: a whole number from 5 to 509."),
    ("frames too many", js(num_frames=510), 400, "invalid_value",
     "num_frames = 510 is not accepted: a whole number from 5 to 509."),
    ("frames fraction", js(num_frames=9.5), 400, "invalid_value",
     "num_frames = 9.5 is not accepted: a whole number from 5 to 509."),
    ("frames bool", js(num_frames=True), 400, "invalid_value",
     "num_frames = True is not accepted: a whole number from 5 to 509."),
    ("frames list", js(num_frames=[9]), 400, "invalid_value",
     "num_frames = [9] is not accepted: a whole number from 5 to 509."),
    ("seconds zero", js(seconds="0"), 400, "invalid_value",
     "seconds = 0 is not accepted: seconds above 0, of at most 509 frames."),
    ("seconds negative", js(seconds=-1), 400, "invalid_value",
     "seconds = -1 is not accepted: seconds above 0, of at most 509 frames."),
    ("seconds text", js(seconds="long"), 400, "invalid_value",
     "seconds = 'long' is not accepted: a number."),
    ("seconds nan", js(seconds="nan"), 400, "invalid_value",
     "seconds = 'nan' is not accepted: a number."),
    ("seconds infinite", js(seconds="1e999"), 400, "invalid_value",
     "seconds = '1e999' is not accepted: a number."),
    ("seconds huge", js(seconds=1e9), 400, "invalid_value",
     "seconds = 1000000000.0 is not accepted: seconds above 0, of at most 509 frames."),
    ("seconds against frames", js(seconds=5, num_frames=9), 400, "conflicting_parameters",
     "seconds = 5 is not accepted: num_frames that last as long (120), or only one of them."),
    ("fps zero", js(fps=0), 400, "invalid_value",
     "fps = 0 is not accepted: a number from 1 to 60."),
    ("fps huge", js(fps=61), 400, "invalid_value",
     "fps = 61 is not accepted: a number from 1 to 60."),
    ("fps nan text", js(fps="NaN"), 400, "invalid_value",
     "fps = 'NaN' is not accepted: a number from 1 to 60."),
    ("steps zero", js(num_inference_steps=0), 400, "invalid_value",
     "num_inference_steps = 0 is not accepted: a whole number from 1 to 200."),
    ("steps many", js(num_inference_steps=201), 400, "invalid_value",
     "num_inference_steps = 201 is not accepted: a whole number from 1 to 200."),
    ("guidance negative", js(guidance_scale=-0.1), 400, "invalid_value",
     "guidance_scale = -0.1 is not accepted: a number from 0 to 20."),
    ("guidance huge", js(guidance_scale=20.5), 400, "invalid_value",
     "guidance_scale = 20.5 is not accepted: a number from 0 to 20."),
    ("seed negative", js(seed=-1), 400, "invalid_value",
     "seed = -1 is not accepted: a whole number from 0 to 9223372036854775807."),
    ("seed too large", js(seed=2**63), 400, "invalid_value",
     "seed = 9223372036854775808 is not accepted: a whole number from 0 to 9223372036854775807."),
    ("seed fraction", js(seed=1.5), 400, "invalid_value",
     "seed = 1.5 is not accepted: a whole number from 0 to 9223372036854775807."),
    ("seed list of wrong length", js(seed=[1,2]), 400, "invalid_value",
     "seed = [1, 2] is not accepted: one whole number, or a list of n = 1."),
    ("seed broken list", js(seed="[1,"), 400, "invalid_value",
     "seed = '[1,' is not accepted: a whole number, or a JSON list of them."),
    ("seed at the end for two", js(seed=2**63-1, n=2), 400, "invalid_value",
     "seed = 9223372036854775807 is not accepted: a whole number from 0 to 9223372036854775807 for eac"
     "h output."),
    ("n zero", js(n=0), 400, "invalid_value",
     "n = 0 is not accepted: a whole number from 1 to 10."),
    ("n many", js(n=5), 400, "invalid_value",
     "n = 5 is not accepted: a whole number from 1 to 4."),
    ("n two names", js(n=2, num_outputs_per_prompt=3), 400, "conflicting_parameters",
     "num_outputs_per_prompt and another name of n differ."),
    ("audio word", js(sample_audio="maybe"), 400, "invalid_value",
     "sample_audio = 'maybe' is not accepted: true or false."),
    ("audio number", js(sample_audio=2), 400, "invalid_value",
     "sample_audio = 2 is not accepted: true or false."),
    ("audio two names", js(sample_audio=True, generate_sound=False), 400, "conflicting_parameters",
     "generate_sound and another name of sample_audio differ."),
    ("too many tokens", js(size="2048x2048", num_frames=121), 400, "invalid_value",
     "size = '2048x2048, 121 frames' is not accepted: at most 200000 video tokens, and this has 507904"
     "."),
    ("sound too long", js(num_frames=509, fps=10, size="64x64"), 400, "invalid_value",
     "num_frames / fps = '509 / 10' is not accepted: sound of at most 47.6 s; fewer frames or a higher"
     " fps."),
    ("quality word", js(quality="best"), 400, "invalid_value",
     "quality = 'best' is not accepted: one of exact, lossless, extra-high, high."),
    ("cache", js(enable_cache_dit=True), 400, "feature_not_enabled",
     "enable_cache_dit needs a step cache, which this server has not loaded."),
    ("expander", js(enhance_prompt=True), 400, "feature_not_enabled",
     "enhance_prompt needs a prompt expander, which this server has not loaded."),
    ("preset", js(x264_preset="placebo"), 400, "invalid_value",
     "x264_preset = 'placebo' is not accepted: one of ultrafast, superfast, veryfast, faster, fast, me"
     "dium, slow."),
    ("scheme", js(visual_cond_scheme="tail_cond_first_frame"), 400, "invalid_value",
     "visual_cond_scheme = 'tail_cond_first_frame' is not accepted: pretrain, since there is no image."),
    ("lora text", js(lora="x"), 400, "invalid_value",
     "lora = 'x' is not accepted: an object, or JSON text of one."),
    ("lora path", js(lora={"path": "/etc/passwd"}), 400, "path_not_allowed",
     "lora.path is not accepted: clients name no files."),
    ("lora name", js(lora={"name": "x"}), 400, "feature_not_enabled",
     "lora needs an adapter, and this server has loaded none."),
    ("output path", js(output_path="/tmp/x.mp4"), 400, "path_not_allowed",
     "output_path names a file of the server, which no client may."),
    ("video reference", js(video_reference="x"), 400, "unsupported_input",
     "video_reference needs a super-resolution checkpoint, which this server has not loaded."),
    ("control", js(control_video="x"), 400, "unsupported_input",
     "control_video is no input of this model."),
    ("extra_body text", js(extra_body="x"), 400, "invalid_value",
     "extra_body = 'x' is not accepted: an object, or JSON text of one."),
    ("extra_params unknown", js(extra_params={"bogus_thing": 1}), 400, "unknown_parameter",
     "'bogus_thing' is no field of this request: see /docs for the known ones."),
    ("path as reference", js(input_reference="/etc/passwd"), 400, "path_not_allowed",
     "input_reference takes a file or a data: URL; a path or another address is not read."),
    ("file url", js(input_reference="file:///etc/passwd"), 400, "path_not_allowed",
     "input_reference takes a file or a data: URL; a path or another address is not read."),
    ("metadata url", js(input_reference="http://169.254.169.254/latest"), 400, "url_not_allowed",
     "input_reference may not be fetched from '169.254.169.254': upload the image, or send a data: URL"
     "."),
    ("https url", js(input_reference="https://example.org/a.png"), 400, "url_not_allowed",
     "input_reference may not be fetched from 'example.org': upload the image, or send a data: URL."),
    ("broken url", js(input_reference="https://[::1"), 400, "url_not_allowed",
     "input_reference may not be fetched from 'https://[::1': upload the image, or send a data: URL."),
    ("file id", js(input_reference={"file_id": "x"}), 400, "file_id_not_supported",
     "input_reference.file_id is not supported: this server keeps no files."),
    ("reference number", js(input_reference=7), 400, "invalid_value",
     "input_reference takes a file, a data: URL, or an object with image_url."),
    ("reference object", js(input_reference={"bogus": 1}), 400, "invalid_value",
     "input_reference takes a file, a data: URL, or an object with image_url."),
    ("reference two", js(input_reference=[url(PNG), url(PNG)]), 400, "conflicting_parameters",
     "input_reference takes exactly one image."),
    ("data url without comma", js(input_reference="data:image/png;base64"), 400, "invalid_value",
     "input_reference is no data:image/...;base64, URL."),
    ("data url bad base64", js(input_reference="data:image/png;base64,@@@@"), 400, "invalid_value",
     "input_reference holds base64 that cannot be read."),
    ("data url of text", js(input_reference="data:text/html;base64,aGk="), 400, "invalid_value",
     "input_reference is no data:image/...;base64, URL."),
    ("svg", ref(SVG,"a.svg"), 400, "invalid_value",
     "input_reference is no JPEG, PNG or WebP image."),
    ("svg data url", js(input_reference=url(SVG,"image/svg+xml")), 400, "invalid_value",
     "input_reference is no JPEG, PNG or WebP image."),
    ("gif", ref(image("GIF"),"a.png"), 400, "invalid_value",
     "input_reference is no JPEG, PNG or WebP image."),
    ("text as png", ref(b"not an image"), 400, "invalid_value",
     "input_reference is no JPEG, PNG or WebP image."),
    ("empty image", ref(b""), 400, "invalid_value",
     "input_reference is no JPEG, PNG or WebP image."),
    ("png cut short", ref(PNG[:60]), 400, "invalid_value",
     "input_reference is damaged or cut short: send a whole JPEG, PNG or WebP image."),
    ("png bomb", ref(bomb_png(50000,50000)), 413, "request_too_large",
     "The image is too large; at most 64 megapixels."),
    ("png beyond the limit", ref(bomb_png(9000,9000)), 413, "request_too_large",
     "The image has 9000x9000 pixels; at most 64 megapixels."),
    ("two files", {"data": PROMPT, "files": [("input_reference",("a.png",PNG)),("input_reference",("b.png",PNG))]}, 400, "conflicting_parameters",  # noqa: E501
     "input_reference takes exactly one image."),
    ("file and text", {"data": PROMPT|{"input_reference":url(PNG)}, "files":[("input_reference",("a.png",PNG))]}, 400, "conflicting_parameters",  # noqa: E501
     "input_reference is given both as a file and as text: give one."),
    ("unknown file", ref(PNG, field="picture"), 400, "unknown_parameter",
     "'picture' takes no file; send one input_reference."),
    ("file name path", ref(b"x", "../../../etc/passwd"), 400, "invalid_value",
     "input_reference is no JPEG, PNG or WebP image."),
    ("form without boundary", raw(b"x","multipart/form-data"), 400, "invalid_value",
     "The multipart body has no boundary in its Content-Type."),
    ("form wrong boundary", form(("prompt","a"), boundary="y"), 400, "invalid_value",
     "The multipart body cannot be read."),
    ("form cut short", form(("prompt","a"), end=b''), 400, "invalid_value",
     "The multipart body ends before its last boundary."),
    ("form garbage", raw(b"\0\1\2"*50,"multipart/form-data; boundary=x"), 400, "invalid_value",
     "The multipart body cannot be read."),
    ("form field twice", form(("prompt","a"),("prompt","b")), 400, "conflicting_parameters",
     "prompt is given twice: give it once."),
    ("form not utf-8", form(("prompt",b"\xff\xfe")), 400, "invalid_value",
     "prompt is not UTF-8 text."),
    ("form odd name", form(("pro mpt","a")), 400, "invalid_value",
     "The form field name 'pro mpt' is not accepted: letters, digits and _, at most 64, then up to 3 k"
     "eys in brackets."),
    ("form deep name", form(("prompt","a"),("a[b][c][d][e]","x")), 400, "invalid_value",
     "The form field name 'a[b][c][d][e]' is not accepted: letters, digits and _, at most 64, then up "
     "to 3 keys in brackets."),
    ("form value and keys", form(("prompt","a"),("lora","a"),("lora[x]","b")), 400, "conflicting_parameters",
     "lora = 'b' is not accepted: either one value, or keys in brackets, not both."),
    ("form many parts", form(*[(f"a{i}","x") for i in range(257)]), 400, "invalid_value",
     "The form has more than 256 parts."),
    ("form huge header", raw(b'--x\r\nContent-Disposition: form-data; name="'+b'a'*5000+b'"\r\n\r\nx\r\n--x--\r\n','multipart/form-data; boundary=x'), 400, "invalid_value",  # noqa: E501
     "The multipart body cannot be read."),
    ("bad idempotency key", {"json": PROMPT, "headers": {"Idempotency-Key": "a b"}}, 400, "invalid_value",
     "Idempotency-Key takes 1 to 255 printable characters."),
    ("body too large", raw(b"x"*(65<<20)), 413, "request_too_large",
     "The request is larger than 64 MiB."),
]
# fmt: on
