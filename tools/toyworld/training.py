"""What every stage shares: a schedule by the clock, averaged weights, a log, and a state that a later call takes up."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass
class Budget:
    """A stage ends when its seconds are spent, so the learning rate follows the clock and not a step count."""

    seconds: float
    warmup_steps: int = 100
    started: float = field(default_factory=time.monotonic)

    def restart(self) -> None:
        self.started = time.monotonic()

    @property
    def spent(self) -> float:
        return time.monotonic() - self.started

    @property
    def over(self) -> bool:
        return self.spent >= self.seconds

    def rate(self, step: int) -> float:
        """Share of the peak learning rate: a short rise, level for the first third, then a cosine down to zero."""
        part = min(self.spent / self.seconds, 1.0)
        fall = 1.0 if part < 0.3 else 0.5 * (1 + math.cos(math.pi * (part - 0.3) / 0.7))
        return min(1.0, (step + 1) / self.warmup_steps) * fall


class Average:
    """Exponential moving average of parameters, with a short memory at the start."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.live = [p for p in model.parameters() if p.requires_grad]
        self.kept = [p.detach().clone() for p in self.live]

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (step + 1) / (step + 10))
        torch._foreach_lerp_(self.kept, self.live, 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange averaged and live weights; call twice to come back."""
        held = [p.clone() for p in self.live]
        torch._foreach_copy_(self.live, self.kept)
        torch._foreach_copy_(self.kept, held)


class Log:
    """One JSON object a line; printed as well."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")

    def __call__(self, **values: Any) -> None:
        rounded = {k: round(v, 6) if isinstance(v, float) else v for k, v in values.items()}
        line = json.dumps(rounded)
        print(line, flush=True)
        self._file.write(line + "\n")
        self._file.flush()


def save_state(path: Path, model: nn.Module, average: Average | None, dtype: torch.dtype = torch.float32) -> None:
    """Write the averaged weights as `ema.*`, the live ones as `raw.*` and the buffers as `ema.*` too."""
    state: dict[str, Tensor] = {}
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    raw = dict(zip(names, [p.detach() for p in model.parameters() if p.requires_grad], strict=True))
    ema = raw if average is None else dict(zip(names, average.kept, strict=True))
    state |= {f"ema.{n}": t for n, t in ema.items()} | {f"raw.{n}": t for n, t in raw.items()}
    state |= {f"ema.{n}": t for n, t in model.state_dict().items() if n not in raw}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({n: t.to("cpu", dtype).contiguous().clone() for n, t in state.items()}, path)


def load_state(path: Path, model: nn.Module, which: str = "ema") -> None:
    """Take up `ema` or `raw` weights (buffers come from `ema`)."""
    state = load_file(path)
    own = model.state_dict()
    found = {n: state.get(f"{which}.{n}", state.get(f"ema.{n}")) for n in own}
    missing = [n for n, t in found.items() if t is None]
    assert not missing, f"{path} lacks {missing[:3]}"
    model.load_state_dict({n: t.to(own[n].dtype) for n, t in found.items() if t is not None})


def resume(path: Path, model: nn.Module) -> Average | None:
    """Take up live and averaged weights from a state, if there is one; returns the average."""
    if not path.exists():
        return None
    load_state(path, model, "ema")
    average = Average(model, 0.0)
    load_state(path, model, "raw")
    return average


def adam(parameters: Iterable[Tensor], decay: float = 0.0) -> torch.optim.Optimizer:
    """AdamW whose rate is a tensor on the GPU, so that a captured step reads the rate of its moment."""
    live = list(parameters)
    gpu = live[0].is_cuda
    rate = torch.zeros((), device=live[0].device) if gpu else 0.0
    return torch.optim.AdamW(live, lr=rate, betas=(0.9, 0.99), weight_decay=decay, fused=gpu, capturable=gpu)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate * group.get("share", 1.0))
        else:
            group["lr"] = rate * group.get("share", 1.0)


Loss = Callable[[dict[str, Tensor]], dict[str, Tensor]]


class Step:
    """Loss, gradients and update of one kind of batch; on a GPU recorded once and replayed, which hides the launches.

    loss: gets the batch and returns named scalars, of which "total" is minimised.
    share: averages a flat vector of gradients over processes in place; it stands between two recordings.
    pool: memory that the recordings of several kinds share; their values are to be read before the next step.
    """

    def __init__(
        self,
        loss: Loss,
        parameters: Iterable[Tensor],
        optimizers: list[torch.optim.Optimizer],
        share: Callable[[Tensor], None] | None = None,
        pool: Any = None,
        record: bool = True,
    ) -> None:
        self._loss, self._live, self._optimizers = loss, list(parameters), optimizers
        self._share, self._pool = share, pool
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._held: dict[str, Tensor] = {}
        self._values: dict[str, Tensor] = {}
        self._flat: Tensor | None = None
        self._record = record and self._live[0].is_cuda
        self._calls = 0

    def __call__(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self._record:
            return self._run(batch)
        self._calls += 1
        if not self._graphs and self._calls <= 3:
            if not self._held:
                self._held = {k: v.clone() for k, v in batch.items()}
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                values = self._run(batch)
            torch.cuda.current_stream().wait_stream(side)
            return values
        for name, value in batch.items():
            self._held[name].copy_(value)
        if not self._graphs:
            self._capture()
        self._graphs[0].replay()
        if self._share is not None and self._flat is not None:
            self._share(self._flat)
        self._graphs[1].replay()
        return self._values

    def _capture(self) -> None:
        for parameter in self._live:
            parameter.grad = None
        torch.cuda.synchronize()
        pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
        self._graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
        with torch.cuda.graph(self._graphs[0], pool=pool, capture_error_mode="thread_local"):
            self._values = self._gradients(self._held)
        with torch.cuda.graph(self._graphs[1], pool=pool, capture_error_mode="thread_local"):
            self._update()

    def _run(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        values = self._gradients(batch)
        if self._share is not None and self._flat is not None:
            self._share(self._flat)
        self._update()
        return values

    def _gradients(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        for parameter in self._live:
            parameter.grad = None
        values = self._loss(batch)
        values["total"].backward()
        if self._share is not None:
            told = [p for p in self._live if p.grad is not None]
            self._flat = torch.cat([p.grad.flatten() for p in told if p.grad is not None])
            for parameter, part in zip(told, self._flat.split([p.numel() for p in told]), strict=True):
                parameter.grad = part.view_as(parameter)
        return {name: value.detach() for name, value in values.items()}

    def _update(self) -> None:
        nn.utils.clip_grad_norm_(self._live, 1.0)
        for optimizer in self._optimizers:
            optimizer.step()


def kernels_agree(loss: Callable[[bool], Tensor], parameters: Iterable[Tensor], log: Callable[..., None]) -> bool:
    """Whether our kernels run here and give torch's loss and gradients, up to the rounding of half precision.

    loss: of the same batch and the same noise, with our kernels or without.
    """
    live, found = list(parameters), []
    for ours in (False, True):
        torch.manual_seed(5)
        try:
            value = loss(ours)
            grads = torch.autograd.grad(value, live, allow_unused=True)
        except Exception as error:  # a compiler that is older or newer, a GPU of another kind
            log(kernels=f"not used: {type(error).__name__}: {str(error)[:300]}")
            return False
        found.append((float(value.detach()), torch.cat([g.flatten() for g in grads if g is not None])))
    (stock, grad), (own, other) = found
    away = float((grad - other).norm() / grad.norm())
    good = abs(own - stock) < 0.01 * abs(stock) and away < 0.1
    log(kernels="used" if good else "not used: they disagree", loss=[stock, own], gradient=away)
    return good


def device() -> torch.device:
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        return torch.device("cuda")
    return torch.device("cpu")
