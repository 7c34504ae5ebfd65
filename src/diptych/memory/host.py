"""Weights packed into one piece of host memory, to be seen from there or from a copy on the device."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn

_ALIGN = 256
_PIECE, _THREADS = 32 << 20, 16
"""Host memory is touched in pieces of so many bytes, by so many threads."""


class _Held(NamedTuple):
    """One parameter or buffer: how to point it elsewhere, and where in the packed bytes it lies."""

    point: Callable[[Tensor], None]
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class Packed:
    """The weights that some modules own, to be moved into host memory side by side.

    `pack` moves them there, `attach` points the modules at a copy of the packed bytes, `detach` leaves them empty:
    nothing is ever copied back. An empty module keeps its dtypes and nothing else, so that running it by mistake fails
    on any device.

    modules: whose parameters and buffers are taken, without those of submodules that are not among them; a tensor that
    several share is packed once.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._sources: dict[int, tuple[Tensor, int]] = {}
        self._held: list[_Held] = []
        self._views: dict[int, list[Tensor]] = {}
        self.nbytes = 0
        for tensor, point in (pair for module in modules for pair in _tensors(module)):
            if not tensor.numel():
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._sources:
                self._sources[storage._cdata] = tensor, self.nbytes
                self.nbytes += -(-storage.nbytes() // _ALIGN) * _ALIGN
            offset = self._sources[storage._cdata][1] // tensor.dtype.itemsize + int(tensor.storage_offset())
            self._held.append(_Held(point, tensor.dtype, offset, tensor.shape, tensor.stride()))

    def pack(self, host: Tensor) -> None:
        """Move the weights into the first bytes of `host`, uint8, aligned to 256 bytes; the modules are empty then."""
        assert host.data_ptr() % _ALIGN == 0 or not self.nbytes
        self.host = host[: self.nbytes]
        for tensor, start in self._sources.values():
            storage = tensor.untyped_storage()
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self.host[start : start + storage.nbytes()].copy_(flat)
        self._sources.clear()
        self.detach()

    def attach(self, copied: Tensor) -> None:
        """Point the modules at `copied`, whose first `nbytes` bytes are, or will be, those of `host`."""
        key = copied.data_ptr()
        if key not in self._views:
            self._views[key] = [
                torch.empty(0, dtype=held.dtype, device=copied.device).set_(
                    copied.untyped_storage(),
                    copied.storage_offset() // held.dtype.itemsize + held.offset,
                    held.size,
                    held.stride,
                )
                for held in self._held
            ]
        for held, view in zip(self._held, self._views[key], strict=True):
            held.point(view)

    def detach(self) -> None:
        for held in self._held:
            held.point(torch.empty(0, dtype=held.dtype))

    def forget(self) -> None:
        """Detach, and hold on to no copy."""
        self.detach()
        self._views.clear()


def host_bytes(nbytes: int, *, page_locked: bool) -> Tensor:
    """Uninitialised host memory, uint8 (nbytes,).

    Page-locked memory is mapped in large pages and touched by several threads before it is locked: torch's own
    allocator has one thread for it, and rounds up to a power of two. What the driver will not lock stays as it is:
    copies from it are slower, and the program waits for them.
    """
    if not page_locked or not nbytes:
        plain = torch.empty(nbytes + _ALIGN, dtype=torch.uint8)
        start = -plain.data_ptr() % _ALIGN
        return plain[start : start + nbytes]
    mapped = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    cudart, address = torch.cuda.cudart(), memory.data_ptr()

    def touch(start: int) -> None:
        ctypes.memset(address + start, 0, min(_PIECE, nbytes - start))

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(touch, range(0, nbytes, _PIECE)))
    if int(cudart.cudaHostRegister(address, nbytes, 0)) == 0:
        weakref.finalize(mapped, cudart.cudaHostUnregister, address)
    else:
        with suppress(RuntimeError):  # the refusal is still to be told, to whoever launches the next kernel
            torch.zeros(1, device="cuda").add_(1)
    return memory


def _tensors(module: nn.Module) -> Iterable[tuple[Tensor, Callable[[Tensor], None]]]:
    """A module's own parameters and buffers, each with the way to replace what it points at."""
    for parameter in module._parameters.values():
        if parameter is not None:
            yield parameter.data, _parameter_setter(parameter)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield buffer, _buffer_setter(module, name)


def _parameter_setter(parameter: nn.Parameter) -> Callable[[Tensor], None]:
    def point(tensor: Tensor) -> None:
        parameter.data = tensor

    return point


def _buffer_setter(module: nn.Module, name: str) -> Callable[[Tensor], None]:
    def point(tensor: Tensor) -> None:
        module._buffers[name] = tensor

    return point
