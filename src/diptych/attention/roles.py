"""Which attention is which: seven roles, and the callable that the transformer is given."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from diptych.attention.queries import Queries


class Role(StrEnum):
    """Every attention of Kandinsky 6. The role, not the presence of an argument, decides how it runs."""

    VISUAL_SELF = "visual_self"
    VISUAL_TEXT = "visual_text"
    AUDIO_SELF = "audio_self"
    AUDIO_TEXT = "audio_text"
    VIDEO_FROM_AUDIO = "video_from_audio"
    AUDIO_FROM_VIDEO = "audio_from_video"
    TEXT_SELF = "text_self"


class Attend(Protocol):
    """Softmax attention with scale 1/sqrt(K), by role.

    q_BSHK, k_BSHK, v_BSHK: queries and keys may differ in length; heads of k and v divide those of q. Where few keys
    meet many queries, `Queries` may stand for these.
    key_mask_BS: bool, True where a key may be seen; `None` means all.
    bound: queries carry log2(e)/sqrt(K) already, in the place of the scale, and no |q k| is larger than this; `None`:
    nothing is known (`exponents`).
    Returns (B, S of q, H, K) in the dtype of q, or as `Queries` allow. A query without any visible key gets zeros.
    """

    def __call__(
        self,
        role: Role,
        q_BSHK: Tensor | Queries,
        k_BSHK: Tensor,
        v_BSHK: Tensor,
        key_mask_BS: Tensor | None = None,
        *,
        bound: float | None = None,
    ) -> Tensor: ...
