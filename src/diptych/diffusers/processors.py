"""Attention of split tokens, as the processors of several models need it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from diptych.attention import Joint, pick, unified_attention
from diptych.attention.kernels import need_of
from diptych.diffusers.backends import kernel_of
from diptych.diffusers.seams import Shared
from diptych.errors import KernelError
from diptych.parallel.patches import PatchShard
from diptych.parallel.sequence import merge_over


class SplitProcessor:
    """What diffusers looks for in a processor; `_attention_backend` follows `model.set_attention_backend`."""

    _parallel_config = None

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self._attention_backend: Any = None

    def within(self, q_BsHK: Tensor, k_BsHK: Tensor, v_BsHK: Tensor) -> Tensor:
        """Attention of split queries to split keys, (B, s, H, K)."""
        kernel, plan = kernel_of(self._attention_backend), self.shared.shard.plan
        return unified_attention(q_BsHK, k_BsHK, v_BsHK, plan, kernel=kernel, **self._cached()).out_BsHK

    def _cached(self) -> dict[str, Any]:
        """Cache and patch, where the tokens come in patches."""
        pipe = self.shared.pipe
        return {} if pipe is None else {"cache": pipe.of(self).within, "patch": pipe.patch}

    def across(self, q_BAHK: Tensor, k_BsHK: Tensor, v_BsHK: Tensor) -> Tensor:
        """Attention of replicated queries to split keys, (B, A, H, K), the same bits on every rank."""
        pipe, shard = self.shared.pipe, self.shared.shard
        if pipe is not None and isinstance(shard, PatchShard):
            k_BsHK, v_BsHK = pipe.of(self).from_video.update(k_BsHK, v_BsHK, shard.local, pipe.patch)
        group = shard.group
        kernel = pick(kernel_of(self._attention_backend), need_of(q_BAHK, k_BsHK, None, lse=group.size > 1))
        if group.size == 1:
            return kernel(q_BAHK, k_BsHK, v_BsHK)
        return merge_over(group, *kernel.with_lse(q_BAHK, k_BsHK, v_BsHK))

    def beside(
        self, q_BsHK: Tensor, k_BsHK: Tensor, v_BsHK: Tensor, joint: Joint, key_mask_BS: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attention of split tokens and joint ones to both: (B, s, H, K), and (B, J, H, K) alike on every rank.

        Joint tokens come with the first patch; the others meet the keys that it left.
        """
        pipe = self.shared.pipe
        if pipe is not None:
            kept = pipe.of(self).joint
            if pipe.patch in (None, 0):
                kept[:] = [(joint.k_BJHK, joint.v_BJHK)]
            joint = replace(joint, k_BJHK=kept[0][0], v_BJHK=kept[0][1])
        attended = unified_attention(
            q_BsHK,
            k_BsHK,
            v_BsHK,
            self.shared.shard.plan,
            joint=joint,
            key_mask_BS=key_mask_BS,
            kernel=kernel_of(self._attention_backend),
            **self._cached(),
        )
        assert attended.joint_BJHK is not None
        return attended.out_BsHK, attended.joint_BJHK


def key_mask(mask: Tensor | None, batch: int, keys: int) -> Tensor | None:
    """A mask as (B, keys) bool. Raises `KernelError` for one that is not a boolean a key."""
    if mask is None:
        return None
    a_boolean_a_key = mask.dtype == torch.bool and mask.shape[-1] == keys and mask.shape[0] in (1, batch)
    if not a_boolean_a_key or mask.ndim not in (2, 4) or (mask.ndim == 4 and mask.shape[1:3] != (1, 1)):
        raise KernelError(
            f"attention_mask of shape {tuple(mask.shape)} and {mask.dtype} is not accepted: booleans of shape "
            f"({batch}, {keys}) or ({batch}, 1, 1, {keys}), one a key."
        )
    return mask.reshape(mask.shape[0], keys).expand(batch, keys)
