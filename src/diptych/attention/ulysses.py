"""Exchanging tokens for heads inside a Ulysses group, and back.

Before: each rank has its own tokens and all heads. Between: all tokens of the group and its own heads. On the wire
every piece is laid out head by head (token by token on the way back), so that packing and unpacking cost one copy each
and sizes may be as uneven as they like.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from diptych.attention.collectives import start_all_gather, start_all_to_all
from diptych.attention.place import Group
from diptych.attention.plan import Span


class HeadExchange:
    """Several tensors x_BsHK with this rank's tokens, on their way to (B, L, own heads, K), in one collective.

    L: the group's tokens in rank order.

    lengths: tokens of each rank of the group. spans: for each tensor, the heads each rank is to have; they may overlap.
    """

    def __init__(
        self, tensors: Sequence[Tensor], lengths: Sequence[int], spans: Sequence[Sequence[Span]], group: Group
    ) -> None:
        self._lengths, self._group = lengths, group
        self._tensors = tensors
        if group.size == 1:
            return
        B, s, _, K = tensors[0].shape
        assert s == lengths[group.rank], f"{s} tokens here, the plan says {lengths[group.rank]}"
        self._B, self._K = B, K
        self._own = [of_ranks[group.rank].size for of_ranks in spans]
        heads_first = [x_BsHK.permute(2, 0, 1, 3) for x_BsHK in tensors]
        pieces = [
            x_HBsK[of_ranks[rank].start : of_ranks[rank].stop]
            for rank in range(group.size)
            for x_HBsK, of_ranks in zip(heads_first, spans, strict=True)
        ]
        send = [sum(of_ranks[rank].size for of_ranks in spans) * B * s * K for rank in range(group.size)]
        receive = [sum(self._own) * B * length * K for length in lengths]
        self._receive = receive
        self._pending = start_all_to_all(torch.cat(pieces).reshape(-1), send, receive, group)

    def wait(self) -> list[Tensor]:
        if self._group.size == 1:
            return list(self._tensors)
        pieces = [
            flat.view(sum(self._own), self._B, length, self._K).split(self._own)
            for flat, length in zip(self._pending.wait().split(self._receive), self._lengths, strict=True)
        ]
        return [
            torch.cat([piece.permute(1, 2, 0, 3) for piece in of_tensor], 1) for of_tensor in zip(*pieces, strict=True)
        ]


def tokens_back(x_BLhK: Tensor, lengths: Sequence[int], spans: Sequence[Span], group: Group) -> Tensor:
    """The inverse for one tensor: (B, L, own heads, K) to (B, own tokens, H, K)."""
    if group.size == 1:
        return x_BLhK
    B, _, h, K = x_BLhK.shape
    own = lengths[group.rank]
    send = [length * B * h * K for length in lengths]
    receive = [own * B * span.size * K for span in spans]
    flat = start_all_to_all(x_BLhK.transpose(0, 1).reshape(-1), send, receive, group).wait()
    pieces = [x.view(own, B, span.size, K) for x, span in zip(flat.split(receive), spans, strict=True)]
    return torch.cat(pieces, 2).transpose(0, 1)


def heads_back(x_BJhK: Tensor, spans: Sequence[Span], group: Group) -> Tensor:
    """All heads of rows that each rank of the group holds: (B, J, own heads, K) to (B, J, H, K), equal on each."""
    if group.size == 1:
        return x_BJhK
    most = max(span.size for span in spans)
    x_hBJK = pad(x_BJhK.permute(2, 0, 1, 3), (0, 0, 0, 0, 0, 0, 0, most - x_BJhK.shape[2]))
    of_ranks = start_all_gather(x_hBJK, group).wait().split(most)
    return torch.cat([x[: span.size] for x, span in zip(of_ranks, spans, strict=True)]).permute(1, 2, 0, 3)
