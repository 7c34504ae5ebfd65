"""Joint tensors: queries, keys and values that every rank holds whole, before or after the split sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from diptych.attention.plan import Heads


@dataclass(frozen=True)
class Joint:
    """J tokens, replicated on all ranks, that stand in front of the sequence or at its rear.

    q_BJHK, k_BJHK, v_BJHK: equal on all ranks, with all heads. key_mask_BJ: bool, True: visible; None: all.

    Raises `ValueError` for another `where`.
    """

    q_BJHK: Tensor
    k_BJHK: Tensor
    v_BJHK: Tensor
    where: Literal["front", "rear"] = "front"
    key_mask_BJ: Tensor | None = None

    def __post_init__(self) -> None:
        if self.where not in ("front", "rear"):
            raise ValueError(f"where = {self.where!r} is not accepted: front or rear.")

    @property
    def rows(self) -> int:
        return self.q_BJHK.shape[1]

    def of_heads(self, heads: Heads) -> Joint:
        """The heads of one rank: these rows are everywhere already, so nothing is sent."""
        kv = slice(heads.kv.start, heads.kv.stop)
        return replace(
            self,
            q_BJHK=self.q_BJHK[:, :, heads.q.start : heads.q.stop],
            k_BJHK=self.k_BJHK[:, :, kv],
            v_BJHK=self.v_BJHK[:, :, kv],
        )

    def with_queries(self, q_BSHK: Tensor) -> Tensor:
        """Joint and sequence queries in their single-process order."""
        return self._in_order(self.q_BJHK, q_BSHK)

    def with_keys(
        self, k_BSHK: Tensor, v_BSHK: Tensor, key_mask_BS: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Joint and sequence keys, values and masks in their single-process order."""
        k, v = self._in_order(self.k_BJHK, k_BSHK), self._in_order(self.v_BJHK, v_BSHK)
        if self.key_mask_BJ is None and key_mask_BS is None:
            return k, v, None
        joint_mask = _all_visible(self.k_BJHK) if self.key_mask_BJ is None else self.key_mask_BJ
        mask = _all_visible(k_BSHK) if key_mask_BS is None else key_mask_BS
        return k, v, self._in_order(joint_mask, mask)

    def split_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Sequence rows and joint rows of a result for `with_queries`."""
        J, S = self.rows, x.shape[1] - self.rows
        if self.where == "front":
            return x[:, J:], x[:, :J]
        return x[:, :S], x[:, S:]

    def _in_order(self, joint: Tensor, sequence: Tensor) -> Tensor:
        return torch.cat([joint, sequence] if self.where == "front" else [sequence, joint], 1)


def _all_visible(k_BSHK: Tensor) -> Tensor:
    return torch.ones(k_BSHK.shape[:2], dtype=torch.bool, device=k_BSHK.device)
