"""Layers that stay in host memory and are on the device only while they are needed, or as long as there is room.

    block        0    1    2    3    4    5    6    7
    compute      0    1    2    3    4    5    6    7      blocks 0, 3, 6 stay; the others share two slots
    copy       1 2       4    5       7    1       2      a slot is filled anew as soon as its block has been computed

On a GPU copies run on a stream of their own, from page-locked memory, and overlap with what is computed. On a CPU the
same copies are made one after the other, so that whatever holds there holds on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diptych.memory.footprint import SLOTS, streamed
from diptych.memory.host import Packed, host_bytes


class _Room:
    """Device memory that holds one set of weights after the other. `holds` is the index of what is in it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.holds: int | None = None
        self.arrived: torch.cuda.Event | None = None
        self.used: torch.cuda.Event | None = None


class Offloaded:
    """A module that lives in host memory: its `layers` one by one, and what is around them as one piece.

    `load(resident)` brings the outer part and that many layers to the device, and two more layers are always on their
    way; with all layers resident the module is simply there. `drop` frees the device. Layers are expected to run one
    after the other; one that is called out of turn is fetched then.

    layers: submodules of `module`; their weights may be read in their own forward only, unless all of them stay.
    leave_out: submodules whose weights are none of this one's business. on_drop: called when the device is freed, for
    what a module has made of its weights. host: memory to use, as `host_bytes` makes it; by default a piece for each
    layer, page-locked where the device is a GPU, so that no more than one layer is ever in host memory twice.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        layers: Sequence[nn.Module] = (),
        *,
        leave_out: Sequence[nn.Module] = (),
        on_drop: Callable[[], None] | None = None,
        host: Tensor | None = None,
    ) -> None:
        self.module, self.device, self.layers, self._on_drop = module, device, list(layers), on_drop
        passed_over = {id(part) for kept in leave_out for part in kept.modules()}
        inside = {id(part) for layer in self.layers for part in layer.modules()}
        self._packed = [Packed(_parts(layer, passed_over)) for layer in self.layers]
        self._outer = Packed(_parts(module, passed_over | inside))
        start = 0
        for packed in (self._outer, *self._packed):
            own = host_bytes(packed.nbytes, page_locked=device.type == "cuda") if host is None else host[start:]
            packed.pack(own)
            start += packed.nbytes
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._outer_room: _Room | None = None
        self._stay: dict[int, _Room] = {}
        self._slots: list[_Room] = []
        self._streamed: list[int] = []
        self._running: int | None = None
        self.fetched = 0
        for index, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(self._entering(index))
            layer.register_forward_hook(self._leaving(index))

    @property
    def host_bytes(self) -> int:
        return self._outer.nbytes + sum(packed.nbytes for packed in self._packed)

    @property
    def outer_bytes(self) -> int:
        return self._outer.nbytes

    @property
    def layer_bytes(self) -> int:
        """Of the largest layer."""
        return max((packed.nbytes for packed in self._packed), default=0)

    @property
    def on_device(self) -> list[int]:
        """Layers whose weights are on the device, or on their way."""
        rooms = [*self._stay.values(), *self._slots]
        return sorted(room.holds for room in rooms if room.holds is not None)

    @property
    def device_bytes(self) -> int:
        rooms = [*self._stay.values(), *self._slots]
        return sum(room.bytes.numel() for room in rooms) + (self._outer_room.bytes.numel() if self._outer_room else 0)

    def load(self, resident: int | None = None, *, ahead: bool = False) -> None:
        """Bring weights in; None: all layers stay. What is there in this way already is not moved.

        On a GPU this returns at once, and what is queued next waits for the outer part; each layer that streams waits
        for its own weights. ahead: nothing waits, until this is called again without it.
        """
        count = len(self.layers)
        moving = streamed(count, count if resident is None else resident)
        if self._outer_room is None or moving != self._streamed:
            self.drop()
            self._begin(moving)
        if not ahead:
            for room in (self._outer_room, *(() if moving else self._stay.values())):
                assert room is not None
                self._wait(room)

    def _begin(self, moving: list[int]) -> None:
        self._streamed = moving
        self._outer_room = self._room(self._outer.nbytes)
        self._fetch(self._outer, 0, self._outer_room)
        self._outer.attach(self._outer_room.bytes)
        widest = max((self._packed[n].nbytes for n in moving), default=0)
        self._slots = [self._room(widest) for _ in range(SLOTS if moving else 0)]
        first = moving[:SLOTS]
        for index in range(len(self.layers)):
            if index in first:
                self._fetch(self._packed[index], index, self._slots[moving.index(index)])
            elif index not in moving:
                room = self._stay[index] = self._room(self._packed[index].nbytes)
                self._fetch(self._packed[index], index, room)
                self._packed[index].attach(room.bytes)

    def drop(self) -> None:
        """Free the device; what still runs there is waited for."""
        if self._outer_room is None:
            return
        if self._copies is not None:
            self._copies.synchronize()
        if self._on_drop is not None:
            self._on_drop()
        self._outer_room, self._stay, self._slots, self._running = None, {}, [], None
        for packed in (self._outer, *self._packed):
            packed.forget()

    def _entering(self, index: int) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            assert self._outer_room is not None, "the layer's weights wait in host memory: load them first"
            if index in self._stay:
                self._wait(self._stay[index])
                return
            self._running = index
            room = self._held(index)
            if room is None:
                room = self._free(self._after(index)[:1])
                self._fetch(self._packed[index], index, room)
            self._wait(room)
            self._packed[index].attach(room.bytes)

        return enter

    def _leaving(self, index: int) -> Any:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if index in self._stay:
                return
            self._running, room = None, self._held(index)
            assert room is not None
            self._packed[index].detach()
            if self._copies is not None:
                room.used = torch.cuda.Event()
                room.used.record(torch.cuda.current_stream(self.device))
            coming = self._after(index)
            for n in coming:
                if self._held(n) is None:
                    self._fetch(self._packed[n], n, self._free(coming))

        return leave

    def _after(self, index: int) -> list[int]:
        """The streamed layers that come next; the first ones come after the last."""
        at = self._streamed.index(index) + 1
        return [self._streamed[(at + n) % len(self._streamed)] for n in range(SLOTS)]

    def _held(self, index: int) -> _Room | None:
        return next((room for room in self._slots if room.holds == index), None)

    def _free(self, keep: Sequence[int]) -> _Room:
        """A slot that holds nothing which is running or coming."""
        return next(room for room in self._slots if room.holds not in keep and room.holds != self._running)

    def _room(self, nbytes: int) -> _Room:
        return _Room(nbytes, self.device)

    def _fetch(self, packed: Packed, index: int, room: _Room) -> None:
        room.holds = index
        self.fetched += packed.nbytes
        into = room.bytes[: packed.nbytes]
        if self._copies is None:
            into.copy_(packed.host)
            return
        if room.used is not None:
            self._copies.wait_event(room.used)
        else:  # the allocator may have handed out memory that the computing stream still reads
            self._copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copies):
            into.copy_(packed.host, non_blocking=True)
            room.arrived = torch.cuda.Event()
            room.arrived.record(self._copies)

    def _wait(self, room: _Room) -> None:
        if room.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(room.arrived)


def _parts(module: nn.Module, passed_over: set[int]) -> list[nn.Module]:
    """Every part of `module` that owns tensors, itself included, but for those passed over."""
    return [part for part in module.modules() if id(part) not in passed_over]
