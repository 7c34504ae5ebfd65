"""Bodies: multipart or JSON, one dictionary either way.

Form names are `name`, `name[key]`, `name[key][key]` or `name[]`; text in them must be UTF-8. Files spool to unnamed
temporary files, so a client that hangs up leaves nothing.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO, Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from diptych.server.problems import Problem, invalid

MAX_PARTS = 256
MAX_DEPTH = 4
_NAME = re.compile(r"[A-Za-z0-9_]{1,64}(\[[A-Za-z0-9_]{1,64}\])*(\[\])?")
_SPOOL = 1 << 20


@dataclass
class Body:
    """`values`: decoded JSON, or form text in the same shape. `files`: (field, content) in the order sent."""

    values: dict[str, Any] = field(default_factory=dict)
    files: list[tuple[str, IO[bytes]]] = field(default_factory=list)
    resources: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        self.resources.close()


async def read_body(content_type: str, chunks: AsyncIterator[bytes]) -> Body:
    """Read a request. Raises `Problem` 415 for another content type, 400 for a body that breaks its own rules."""
    kind, options = parse_options_header(content_type)
    if kind == b"application/json":
        return Body(parse_json(b"".join([chunk async for chunk in chunks])))
    if kind == b"multipart/form-data":
        boundary = options.get(b"boundary", b"")
        if not 0 < len(boundary) <= 200:
            raise Problem(400, "invalid_value", "The multipart body has no boundary in its Content-Type.")
        return await _read_form(boundary, chunks)
    raise Problem(
        415,
        "unsupported_media_type",
        f"Content-Type {content_type[:80]!r} is not accepted: send multipart/form-data or application/json.",
    )


def parse_json(data: bytes) -> dict[str, Any]:
    """A JSON object without repeated names, NaN or infinities. Raises `Problem`."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise _no_json("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise _no_json("it is not UTF-8") from None
    except ValueError as error:
        text = str(error)
        raise _no_json("a number has too many digits" if "digits" in text else text) from None
    if not isinstance(value, dict):
        raise Problem(400, "invalid_json", "The body is not a JSON object.")
    return value


def _no_json(why: str) -> Problem:
    return Problem(400, "invalid_json", f"The body is not JSON that can be read: {why}.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise Problem(400, "conflicting_parameters", f"{name[:64]} is given twice: give it once.", name[:64])
        found[name] = value
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


class _Reader:
    """Callbacks of python-multipart."""

    def __init__(self, body: Body) -> None:
        self.body, self.parts = body, 0
        self.header, self.value = b"", b""
        self.name, self.filename = "", False
        self.disposition = b""
        self.content: IO[bytes] | None = None
        self.ended = False

    def on_part_begin(self) -> None:
        self.parts += 1
        if self.parts > MAX_PARTS:
            raise Problem(400, "invalid_value", f"The form has more than {MAX_PARTS} parts.")
        self.header, self.value, self.disposition = b"", b"", b""

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self.header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self.value += data[start:end]
        if len(self.value) > 1024:
            raise Problem(400, "invalid_value", "A part of the form has a header of more than 1024 bytes.")

    def on_header_end(self) -> None:
        if self.header.lower() == b"content-disposition":
            self.disposition = self.value
        self.header, self.value = b"", b""

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self.disposition)
        raw = options.get(b"name", b"")
        self.name = raw.decode("utf-8", "replace")
        if not _NAME.fullmatch(self.name) or self.name.count("[") >= MAX_DEPTH:
            raise Problem(
                400,
                "invalid_value",
                f"The form field name {self.name[:80]!r} is not accepted: letters, digits and _, "
                f"at most 64, then up to {MAX_DEPTH - 1} keys in brackets.",
            )
        self.filename = b"filename" in options
        self.content = self.body.resources.enter_context(tempfile.SpooledTemporaryFile(_SPOOL))  # noqa: SIM115 - Body closes it

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        assert self.content is not None
        self.content.write(data[start:end])

    def on_part_end(self) -> None:
        assert self.content is not None
        self.content.seek(0)
        if self.filename:
            self.body.files.append((self.name, self.content))
            return
        try:
            text = self.content.read().decode("utf-8")
        except UnicodeDecodeError:
            raise Problem(400, "invalid_value", f"{self.name} is not UTF-8 text.", self.name) from None
        _put(self.body.values, self.name, text)

    def on_end(self) -> None:
        self.ended = True


async def _read_form(boundary: bytes, chunks: AsyncIterator[bytes]) -> Body:
    body = Body()
    reader = _Reader(body)
    names = [n for n in dir(reader) if n.startswith("on_")]
    parser = MultipartParser(boundary, {n: getattr(reader, n) for n in names})  # type: ignore[arg-type]
    try:
        async for chunk in chunks:
            parser.write(chunk)
        parser.finalize()
    except FormParserError:
        body.close()
        raise Problem(400, "invalid_value", "The multipart body cannot be read.") from None
    except BaseException:
        body.close()
        raise
    if not reader.ended:
        body.close()
        raise Problem(400, "invalid_value", "The multipart body ends before its last boundary.")
    return body


def _put(values: dict[str, Any], name: str, text: str) -> None:
    """Place `a[b][c]` or `a[]` in nested dictionaries and lists."""
    head, *keys = [key.rstrip("]") for key in name.split("[")]
    at: Any = values
    for key, following in zip([head, *keys], [*keys, None], strict=True):
        if key == "":
            at.append(text)
        elif following is None:
            if key in at:
                raise Problem(400, "conflicting_parameters", f"{name} is given twice: give it once.", head)
            at[key] = text
        else:
            at = at.setdefault(key, [] if following == "" else {})
            if not isinstance(at, list if following == "" else dict):
                raise invalid(head, text, "either one value, or keys in brackets, not both", "conflicting_parameters")
