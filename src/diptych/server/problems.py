"""What a client is told when a request cannot be honoured: OpenAI's error shape, one sentence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from diptych.errors import RequestError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    409: "conflict_error",
    429: "rate_limit_error",
}

WIRE_NAMES = {
    "frames / fps": "num_frames / fps",
    "frames": "num_frames",
    "steps": "num_inference_steps",
    "guidance": "guidance_scale",
    "negative": "negative_prompt",
    "audio": "sample_audio",
    "audio_level": "audio_normalization",
    "fit": "reference_fit",
    "image": "input_reference",
    "max_text_tokens": "max_sequence_length",
}
"""Field of `ClipRequest` -> field of the API."""


@dataclass
class Problem(Exception):  # noqa: N818 - an answer, not an error
    """An answer other than 2xx. `headers` may tell a client when, or never, to try again."""

    status: int
    code: str
    message: str
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error | self.extra}

    def __str__(self) -> str:
        return self.message


def invalid(param: str, value: object, accepted: str, code: str = "invalid_value") -> Problem:
    """400 for one field: names the field, the value, and what is accepted."""
    return from_request_error(RequestError(param, value, accepted), code)


def from_request_error(error: RequestError, code: str = "invalid_value") -> Problem:
    """400 from a refusal of `ClipRequest`, under the field's name on the wire."""
    name = WIRE_NAMES.get(error.field, error.field)
    return Problem(400, code, str(RequestError(name, error.value, error.accepted)), name.split(" ")[0])


def not_found(job_id: str) -> Problem:
    return Problem(404, "video_not_found", f"No video has the id {job_id[:80]!r}.", "video_id")
