"""Ring attention: queries stay, keys and values of each rank go once round the ring, partial results are merged.

Joint keys are attended once, beside the rank's own keys, and never travel. Joint queries would meet the sources in
another order on every rank and drift apart in the last bit; so they keep one partial result a source, made by the same
call on the same numbers everywhere, and merge them in the order of the sources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from diptych.attention.collectives import start_shift
from diptych.attention.joint import Joint
from diptych.attention.merge import Merger, merge
from diptych.attention.place import Group

AttendWithLse = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""(q, k, v, key mask) to (output, log-sum-exp)."""
Partial = tuple[Tensor, Tensor]
"""Output (B, S, H, K) and log-sum-exp (B, S, H)."""


def ring_attention(
    attend: AttendWithLse,
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHK: Tensor,
    *,
    group: Group,
    lengths: Sequence[int],
    masks: Sequence[Tensor | None],
    joint: Joint | None = None,
) -> tuple[Partial, Partial | None]:
    """Attention of this rank's queries, and of the joint ones, over the keys of all ranks of the ring.

    lengths, masks: keys of each ring rank, and which of them may be seen. The next transfer is started before the
    present part is computed. Where there are more ranks than heads, a whole ring may have none: nothing is sent in it.
    """
    k_and_v_N = torch.cat([k_BSHK.reshape(-1), v_BSHK.reshape(-1)])
    B, _, H, K = k_BSHK.shape
    joint_parts: dict[int, Partial] = {}
    merger = Merger(group.size, q_BSHK.dtype)
    for step in range(group.size):
        source = (group.rank - step) % group.size
        pending = None
        if step < group.size - 1 and H > 0:
            next_source = (source - 1) % group.size
            pending = start_shift(k_and_v_N, 2 * B * lengths[next_source] * H * K, group)
        k, v = k_and_v_N.view(2, B, lengths[source], H, K).unbind(0)
        mask = masks[source]
        if joint is not None:
            joint_parts[source] = attend(joint.q_BJHK, k, v, mask)
        keys = joint.with_keys(k, v, mask) if joint is not None and step == 0 else (k, v, mask)
        merger.add(*attend(q_BSHK, *keys))
        if pending is not None:
            k_and_v_N = pending.wait()
    if joint is None:
        return merger.result(), None
    own_part = attend(joint.q_BJHK, joint.k_BJHK, joint.v_BJHK, joint.key_mask_BJ)
    parts = [own_part, *(joint_parts[source] for source in range(group.size))]
    return merger.result(), merge(parts, q_BSHK.dtype)
