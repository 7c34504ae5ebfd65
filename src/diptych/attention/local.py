"""Attention on one rank: every role by the best kernel that can."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from diptych.attention.kernels import KERNELS, check_name, need_of, pick
from diptych.attention.queries import Queries
from diptych.attention.roles import Role


class LocalAttend:
    """An `Attend` that computes everything here.

    kernel: a name from `kernels.KERNELS` for every role, or a mapping from role to name; roles left out, and `"auto"`,
    take the fastest kernel that can serve the call.

    Raises `KernelError` for a name that does not exist, and, when called, for a kernel that cannot serve the call.
    """

    def __init__(self, kernel: str | Mapping[Role, str] = "auto") -> None:
        by_role = dict.fromkeys(Role, kernel) if isinstance(kernel, str) else dict(kernel)
        for name in by_role.values():
            check_name(name)
        self.kernels: dict[Role, str] = {role: by_role.get(role, "auto") for role in Role}

    def exact(self) -> LocalAttend:
        """The same without kernels that approximate: `"auto"` in their place."""
        approximate = {kernel.name for kernel in KERNELS if not kernel.exact}
        return LocalAttend({role: "auto" if name in approximate else name for role, name in self.kernels.items()})

    def __call__(
        self,
        role: Role,
        q_BSHK: Tensor | Queries,
        k_BSHK: Tensor,
        v_BSHK: Tensor,
        key_mask_BS: Tensor | None = None,
        *,
        bound: float | None = None,
    ) -> Tensor:
        """Attention, (B, S of q, H, K) in the dtype of q, or as `Queries` allow; see `Attend`."""
        kernel = pick(self.kernels[role], need_of(q_BSHK, k_BSHK, key_mask_BS, lse=False, bound=bound))
        return kernel(q_BSHK, k_BSHK, v_BSHK, key_mask_BS, bound=bound)

    def with_lse(
        self,
        role: Role,
        q_BSHK: Tensor,
        k_BSHK: Tensor,
        v_BSHK: Tensor,
        key_mask_BS: Tensor | None = None,
        *,
        bound: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The same, and its natural log-sum-exp (B, S of q, H), float32 (float64 for float64)."""
        kernel = pick(self.kernels[role], need_of(q_BSHK, k_BSHK, key_mask_BS, lse=True, bound=bound))
        return kernel.with_lse(q_BSHK, k_BSHK, v_BSHK, key_mask_BS, bound=bound)
