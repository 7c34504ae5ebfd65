"""Streaming weights from safetensors files into a module built on the meta device.

Tensor by tensor, in the order they lie in the files, straight to device and dtype: the host never holds more than one
tensor beside those that stay on it. Names, shapes and files are checked before the first byte is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from diptych.errors import CheckpointError
from diptych.model.catalogue import OnBytes
from diptych.model.checkpoint import Checkpoint
from diptych.model.fp8 import Fp8Linear
from diptych.model.headers import StoredTensor
from diptych.model.inventory import Component, Rename, matched
from diptych.model.keys import Shape, current_name, stays_as_stored, transformer_keys
from diptych.model.quantised import QuantisedLinear

DtypeRule = Callable[[str, torch.dtype], torch.dtype]
"""(name in the module, stored dtype) to the dtype it is held in."""

Cut = tuple[int, int, int]
"""(dimension, start, stop): the part of a stored tensor that is meant; of several, each is a part of the one before."""

Place = Callable[[nn.Module, str, Tensor], None]
"""Puts a loaded tensor under its name into a module."""

_CHUNK = 64 << 20


def cast_floats(dtype: torch.dtype) -> DtypeRule:
    """Every floating-point tensor in `dtype`, the others as they are."""
    return lambda _, stored: dtype if stored.is_floating_point else stored


def transformer_dtypes(dtype: torch.dtype) -> DtypeRule:
    """The transformer's rule: embeddings and modulations stay as stored, the rest is held in `dtype`."""
    return lambda name, stored: stored if stays_as_stored(name) else dtype


class ParametersOnMeta(TorchFunctionMode):
    """Builds modules whose parameters take no memory, while their computed buffers (rotary frequencies, filters) live.

    `torch.device("meta")` would lose the buffers that no file stores.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:  # what torch.nn allocates parameters with, before it draws them
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def load_into(
    module: nn.Module,
    component: Component,
    *,
    device: torch.device | str,
    dtypes: DtypeRule,
    rename: Rename = str,
    on_bytes: OnBytes | None = None,
    shapes: Mapping[str, Shape] | None = None,
    cuts: Mapping[str, Sequence[Cut]] | None = None,
    place: Place | None = None,
) -> None:
    """Fill every parameter and stored buffer of `module` from `component`; they become frozen.

    module: built on meta (or with `ParametersOnMeta`). It may be a part of the stored model, if `rename` answers `None`
    for what it lacks. on_bytes: told stored bytes read and to read.
    shapes: of the stored tensors by name in the module, where they are not the module's. cuts: by the same names, which
    part of a tensor is read; nothing else of it is. place: what puts a tensor into its module.

    Raises `CheckpointError` naming tensor and file for one that is unknown, missing, stored twice or mis-shaped,
    before anything is read.
    """
    wanted = matched(component, shapes or dict(_stored_names(module)), rename)
    parts = [(name, _cut(stored, (cuts or {}).get(name, ()))) for name, stored in wanted.items()]
    put = place or place_plain
    for name, tensor in stream(parts, device=device, dtypes=dtypes, on_bytes=on_bytes):
        put(module, name, tensor)
    for name, buffer in list(module.named_buffers()):  # those that no file stores
        if name not in wanted:
            put(module, name, buffer.to(device))
    left = [n for n, t in (*module.named_parameters(), *module.named_buffers()) if t.is_meta]
    assert not left, f"{left[0]} is still on meta: neither stored nor computed"


def load_transformer(
    module: nn.Module,
    checkpoint: Checkpoint,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    on_bytes: OnBytes | None = None,
    cuts: Mapping[str, Sequence[Cut]] | None = None,
    place: Place | None = None,
) -> None:
    """Fill a transformer, or the part of one that a rank holds, from a checkpoint of either naming.

    Embeddings and modulations stay in the dtype they are stored in, all else is held in `dtype`. cuts, place: as for
    `load_into`.
    """
    known, here = transformer_keys(checkpoint.transformer), dict(_stored_names(module))

    def rename(stored: str) -> str | None:
        name = current_name(stored)
        return name if name in here or name not in known else None

    load_into(
        module,
        checkpoint["transformer"],
        device=device,
        dtypes=transformer_dtypes(dtype),
        rename=rename,
        on_bytes=on_bytes,
        shapes={name: known.get(name, shape) for name, shape in here.items()},
        cuts=cuts,
        place=place,
    )


def stream(
    wanted: Iterable[tuple[str, StoredTensor]],
    *,
    device: torch.device | str,
    dtypes: DtypeRule,
    on_bytes: OnBytes | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Read tensors one after the other: (name, tensor on `device` in the dtype that `dtypes` tells).

    Each file is opened once if `wanted` is in the order of the files.
    """
    pairs = [(name, stored, dtypes(name, stored.dtype)) for name, stored in wanted]
    total, done = sum(stored.nbytes for _, stored, _ in pairs), 0
    device = torch.device(device)
    # One buffer for all that is cast: a fresh one each time would leave a hole in the heap beside every result.
    cast = [stored.nbytes for _, stored, dtype in pairs if dtype != stored.dtype]
    scratch = torch.empty(max(cast, default=0), dtype=torch.uint8, device=device)
    staging = _Staging() if device.type == "cuda" else None
    opened: tuple[Path, BinaryIO] | None = None
    try:
        for name, stored, dtype in pairs:
            if opened is None or opened[0] != stored.file:
                if opened is not None:
                    opened[1].close()
                opened = stored.file, stored.file.open("rb", buffering=0)
            if dtype == stored.dtype:
                tensor = torch.empty(stored.shape, dtype=dtype, device=device)
            else:
                tensor = scratch[: stored.nbytes].view(stored.dtype).reshape(stored.shape)
            raw = tensor.reshape(-1).view(torch.uint8)
            if staging is None:
                _read(opened[1], stored, raw, 0)
            else:
                staging.read(opened[1], stored, raw)
            yield name, tensor.to(dtype)
            done += stored.nbytes
            if on_bytes is not None:
                on_bytes(done, total)
    except OSError as error:
        raise CheckpointError(f"{stored.file} cannot be read: {error.strerror or error}") from error
    finally:
        if opened is not None:
            opened[1].close()


class _Staging:
    """Two pinned buffers: while one is copied to the GPU, the other is read into."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(_CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0

    def read(self, file: BinaryIO, stored: StoredTensor, out: Tensor) -> None:
        with torch.cuda.device(out.device):
            for start in range(0, out.numel(), _CHUNK):
                part = out[start : start + _CHUNK]
                buffer, copied = self._buffers[self._turn][: part.numel()], self._copied[self._turn]
                copied.synchronize()
                _read(file, stored, buffer, start)
                part.copy_(buffer, non_blocking=True)
                copied.record()
                self._turn = 1 - self._turn


def _read(file: BinaryIO, stored: StoredTensor, out: Tensor, start: int) -> None:
    """Fill `out` (uint8, on the host) with the bytes of `stored` from `start`, row by row where rows have gaps."""
    view = memoryview(out.numpy().data)
    row = stored.nbytes // max(stored.shape[0], 1) if stored.pitch else 0
    while view:
        position, most = start, len(view)
        if row:
            position, most = start // row * stored.pitch + start % row, row - start % row
        file.seek(stored.offset + position)
        count = file.readinto(view[:most])  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"{stored.file} ends inside tensor {stored.name}")
        view, start = view[count:], start + count


def _cut(stored: StoredTensor, cuts: Sequence[Cut]) -> StoredTensor:
    for dim, start, stop in cuts:
        stored = stored.part(dim, start, stop)
    return stored


def _stored_names(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of what a file stores of `module`: parameters and persistent buffers."""
    for name, tensor in module.state_dict(keep_vars=True).items():
        yield name, tuple(tensor.shape)


def place_at(rests: Callable[[str], torch.device]) -> Place:
    """`place_plain`, and then to where the tensor of this name is to rest, whichever device it was read to."""

    def place(module: nn.Module, name: str, tensor: Tensor) -> None:
        place_plain(module, name, tensor)
        path, _, leaf = name.rpartition(".")
        owner, device = module.get_submodule(path), rests(name)
        if isinstance(owner, Fp8Linear | QuantisedLinear) and leaf == "weight":
            owner.weight_scale = owner.weight_scale.to(device)
        if leaf in owner._parameters:
            parameter = owner._parameters[leaf]
            assert parameter is not None
            parameter.data = parameter.data.to(device)
        elif owner._buffers[leaf] is not None:
            owner._buffers[leaf] = owner._buffers[leaf].to(device)  # type: ignore[union-attr]

    return place


def place_plain(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Make a loaded tensor the parameter or buffer of this name, frozen."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if isinstance(owner, Fp8Linear | QuantisedLinear) and leaf == "weight":
        owner.take_weight(tensor)  # tensor by tensor: never more than one stands beside its quantised form
    elif leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor
