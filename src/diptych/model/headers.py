"""What weight files hold, read from their safetensors headers alone.

A file is eight bytes of length, that many bytes of JSON, then the tensors at the offsets the JSON tells.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diptych.errors import CheckpointError

if TYPE_CHECKING:
    import torch

DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""The format's name of a dtype to torch's name and bytes: headers are read without importing torch, which is slow."""
_MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file: `nbytes` bytes from `offset` (from the start of the file), row-major.

    stored_as: its dtype as the format names it, a key of `DTYPES`.
    pitch: bytes from one row to the next where only a part of each row is meant; 0 where row follows row.
    """

    name: str
    stored_as: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    pitch: int = 0

    def part(self, dim: int, start: int, stop: int) -> StoredTensor:
        """Rows (`dim` 0) or columns (`dim` 1, of a matrix) start..stop."""
        size = self.shape[dim]
        assert 0 <= start <= stop <= size, f"{start}..{stop} of {size}"
        row = self.nbytes // max(self.shape[0], 1)
        if dim == 0:
            offset = self.offset + start * (self.pitch or row)
            return replace(self, shape=(stop - start, *self.shape[1:]), offset=offset)
        assert dim == 1 and len(self.shape) == 2
        offset = self.offset + start * (row // size)
        return replace(self, shape=(self.shape[0], stop - start), offset=offset, pitch=self.pitch or row)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPES[self.stored_as][1]

    @property
    def dtype_name(self) -> str:
        """Such as `bfloat16`."""
        return DTYPES[self.stored_as][0]

    @property
    def dtype(self) -> torch.dtype:
        import torch

        found: torch.dtype = getattr(torch, self.dtype_name)
        return found


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file in the order of their data.

    Raises `CheckpointError` for a file that is missing, shorter than its header says, or of another kind.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(8)
            if head.startswith(b"version "):
                raise CheckpointError(f"{file} is a Git LFS pointer: the weights themselves were not fetched")
            length = int.from_bytes(head, "little")
            if len(head) < 8 or not 2 <= length <= _MAX_HEADER:
                raise CheckpointError(f"{file} is not a safetensors file, or cut off after {size} bytes")
            raw = stream.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    if len(raw) < length:
        raise CheckpointError(f"{file} is truncated: it holds {size} of the {8 + length} bytes of its header")
    try:
        header = json.loads(raw)
        assert isinstance(header, dict)
    except (ValueError, AssertionError, RecursionError):
        raise CheckpointError(f"{file} is not a safetensors file: its header is not a JSON object") from None
    header.pop("__metadata__", None)
    tensors = stored_tensors(header, file, 8 + length)
    end = max((t.offset + t.nbytes for t in tensors.values()), default=8 + length)
    if size < end:
        raise CheckpointError(f"{file} is truncated: it holds {size} of {end} bytes")
    return tensors


def stored_tensors(header: dict[str, Any], file: Path, start: int) -> dict[str, StoredTensor]:
    """Decode a header; `start` is where the data begin. Raises `CheckpointError` for an entry that makes no sense."""
    tensors = []
    for name, entry in header.items():
        try:
            first, last = entry["data_offsets"]
            shape = tuple(int(n) for n in entry["shape"])
            tensor = StoredTensor(name, entry["dtype"], shape, file, start + int(first))
            sound = tensor.nbytes == last - first and first >= 0
        except (KeyError, TypeError, ValueError):
            sound = False
        if not sound:
            raise CheckpointError(f"{file}: the entry of tensor {name} is damaged or of an unknown dtype")
        tensors.append(tensor)
    return {t.name: t for t in sorted(tensors, key=lambda t: t.offset)}


def weight_files(folder: Path, listing: Iterable[str]) -> tuple[list[Path], dict[str, str] | None]:
    """The safetensors files of a component among `listing`, and the index (tensor to file name) if it is sharded.

    Raises `CheckpointError` if there are none, or if the index cannot be read or names a file that is missing.
    """
    names = sorted(listing)
    indices = [n for n in names if n.endswith(".safetensors.index.json")]
    plain = [n for n in names if n in ("model.safetensors", "diffusion_pytorch_model.safetensors")]
    files = plain or [n for n in names if n.endswith(".safetensors")]
    if indices:
        index = read_json(folder / indices[0]).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise CheckpointError(f"{folder / indices[0]} has no weight_map")
        for name in sorted(set(index.values())):
            if name not in names:
                raise CheckpointError(f"{folder / name} is missing, and {indices[0]} names it")
        return [folder / name for name in sorted(set(index.values()))], index
    if not files:
        others = [n for n in names if n.endswith((".bin", ".pt", ".ckpt"))]
        hint = f"; {others[0]} is not read, only safetensors are" if others else ""
        raise CheckpointError(f"{folder} holds no .safetensors file{hint}")
    if len(files) > 1:
        raise CheckpointError(f"{folder} holds {len(files)} .safetensors files and no index that tells what is where")
    return [folder / files[0]], None


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises `CheckpointError` if the file is missing or holds something else."""
    try:
        values = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    except RecursionError:
        raise CheckpointError(f"{file} cannot be read as JSON: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} should hold a JSON object, not a {type(values).__name__}")
    return values
