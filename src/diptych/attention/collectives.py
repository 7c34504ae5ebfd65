"""Exchanges as functional collectives with static sizes, started and awaited apart; and a counter of what they send.

The functional operators are called directly rather than through their Python wrappers: those wait at once while being
traced, which would put every transfer in front of the computation it should hide behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives  # registers the shapes of the operators below
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from diptych.attention.place import Group


class Pending:
    """A tensor on its way. `wait()` gives it, once."""

    def __init__(self, tensor: Tensor, in_flight: bool) -> None:
        self._tensor, self._in_flight = tensor, in_flight

    def wait(self) -> Tensor:
        if self._in_flight:
            self._in_flight = False
            self._tensor = torch.ops._c10d_functional.wait_tensor(self._tensor)
        return self._tensor


def start_all_to_all(x_N: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Pending:
    """Send `send[i]` elements of the flat, contiguous `x_N` to rank i of `group`, receive `receive[i]` from it."""
    if group.size == 1:
        return Pending(x_N, False)
    assert sum(send) == x_N.numel() and x_N.ndim == 1
    out_N = torch.ops._c10d_functional.all_to_all_single(x_N, list(receive), list(send), group.name)
    return Pending(out_N, True)


def start_shift(x_N: Tensor, receive: int, group: Group) -> Pending:
    """Send the whole flat `x_N` to the next rank of `group`, receive `receive` elements from the one before."""
    send_sizes, receive_sizes = [0] * group.size, [0] * group.size
    send_sizes[(group.rank + 1) % group.size] = x_N.numel()
    receive_sizes[(group.rank - 1) % group.size] = receive
    return start_all_to_all(x_N, send_sizes, receive_sizes, group)


def start_all_gather(x: Tensor, group: Group) -> Pending:
    """All ranks' `x`, of one shape, end to end along dimension 0 in rank order."""
    if group.size == 1:
        return Pending(x, False)
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), group.size, group.name)
    return Pending(gathered, True)


def start_all_reduce(x: Tensor, group: Group) -> Pending:
    """The sum of all ranks' `x`, the same bits on every rank."""
    if group.size == 1:
        return Pending(x, False)
    return Pending(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group.name), True)


class Sent(NamedTuple):
    """One collective: the operator, the bytes this rank sent to others in it, and the size of its group."""

    collective: str
    bytes: int
    ranks: int


class Traffic(TorchDispatchMode):
    """Records every collective that runs, uncompiled, inside `with Traffic() as traffic:`.

    `traffic.sent` lists them; `traffic.bytes` is their sum. A collective whose bytes it cannot tell is an error, so
    that nothing goes uncounted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: list[Sent] = []

    @property
    def bytes(self) -> int:
        return sum(sent.bytes for sent in self.sent)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("_c10d_functional", "c10d") and "wait_tensor" not in func.name():
            self.sent.append(sent_by(func.name().split("::")[1], args))
        return func(*args, **(kwargs or {}))


def sent_by(collective: str, args: tuple[Any, ...]) -> Sent:
    """What this rank sends in one functional collective, given the operator's name and arguments."""
    if collective == "all_to_all_single":
        x, _, send, name = args
        group = _resolve_process_group(name)
        return Sent(collective, (sum(send) - send[group.rank()]) * x.element_size(), group.size())
    if collective == "all_gather_into_tensor":
        x, size, _ = args
        return Sent(collective, (size - 1) * x.numel() * x.element_size(), size)
    if collective == "all_reduce":  # round a ring: once to add up, once to tell
        x, _, name = args
        size = _resolve_process_group(name).size()
        return Sent(collective, 2 * (size - 1) * x.numel() * x.element_size() // size, size)
    raise AssertionError(f"cannot tell how many bytes {collective} sends")
