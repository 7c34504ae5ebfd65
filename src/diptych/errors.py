"""Errors that a user reads: one sentence that names the field, the value and what would be accepted.

Everything here is a `ValueError`, so that a caller who knows nothing of Diptych can catch it; the command line prints
the sentence and exits with status 2, the server answers 400 with it. A fault of ours stays an `AssertionError`.
"""

from __future__ import annotations


class UserError(ValueError):
    """Something the user can change: the message is one clear sentence."""


class RequestError(UserError):
    """A field of a request that cannot be honoured.

    `field`, `value` and `accepted` stay readable for machines; `str(error)` is the sentence.
    """

    def __init__(self, field: str, value: object, accepted: str) -> None:
        self.field, self.value, self.accepted = field, value, accepted
        shown = " ".join(line.strip() for line in repr(value).splitlines())  # arrays take several lines
        if len(shown) > 80:
            shown = shown[:77] + "…" + shown[-1]
        super().__init__(f"{field} = {shown} is not accepted: {accepted}.")

    def __reduce__(self) -> tuple[type[RequestError], tuple[str, object, str]]:
        return RequestError, (self.field, self.value, self.accepted)


class MissingError(RequestError):
    """A field that nobody gave, and that nothing can fill in here."""

    def __init__(self, field: str, accepted: str) -> None:
        super().__init__(field, None, accepted)
        self.args = (f"{field} is missing: {accepted}.",)

    def __reduce__(self) -> tuple[type[MissingError], tuple[str, str]]:  # type: ignore[override]
        return MissingError, (self.field, self.accepted)


class CheckpointError(UserError):
    """A checkpoint that is missing, incomplete, damaged, or of another kind."""


class LayoutError(UserError):
    """A layout that cannot be read, built, or does not fit the model or the machine."""


class MediaError(UserError):
    """An image or clip that cannot be read or written."""


class ClipError(MediaError):
    """A finished clip that is not fit to be called finished: not finite, flat, silent, or of another size."""


class KernelError(UserError):
    """An attention kernel that cannot do what a call needs; names one that can."""


class RankError(RuntimeError):
    """A rank failed or is gone; the message ends with that rank's own traceback, if it left one."""


class DeviceMemoryError(RankError):
    """A device ran out of memory: what was predicted, what was used, and what takes less, in one or two sentences."""


class Cancelled(Exception):  # noqa: N818 - not an error
    """The caller asked to stop; raised at the first step boundary after that."""
