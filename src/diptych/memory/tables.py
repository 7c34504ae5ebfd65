"""Modulation tables: all that time decides, computed once a request, so that its weights need no room on the GPU.

Modulation is 4.7 of Pro's 30.1 billion parameters and depends on nothing but timestep and pooled text. Its weights wait
in host memory and visit the device one block at a time, while all steps of a request are computed from them: the same
calls as in a step, so the results are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from diptych.model.layers import Modulation
from diptych.model.transformer import Modulations, TextContext, Transformer


def park(model: Transformer) -> Transformer:
    """Move the weights of every modulation to host memory; returns the same model.

    From then on only `ModulationTables` can compute modulations. The memory is not page-locked: that took 36 s for the
    18.8 GB of Pro, for the sake of copies that happen once a request.
    """
    for module in modulation_layers(model):
        for parameter in module.parameters():
            parameter.data = parameter.data.cpu()
    return model


class ModulationTables:
    """The modulations of every step and lane of one request.

    timesteps (N,): float32, 0..1000, each once; contexts: one a lane; audio: whether the clip has sound. Holds
    17.7 MB a step and lane for Pro; on_host: in host memory, from where each forward fetches its own.
    """

    def __init__(
        self,
        model: Transformer,
        timesteps: Tensor,
        contexts: Sequence[TextContext],
        *,
        audio: bool,
        on_host: bool = False,
    ) -> None:
        self._device = contexts[0].pooled_video.device
        self._index = {float(timestep): n for n, timestep in enumerate(timesteps.cpu())}
        self._contexts = list(contexts)
        home = torch.device("cpu") if on_host else self._device
        lanes = [_table(model, timesteps, context, audio, self._device, home) for context in contexts]
        self._lanes = [[_OnHost(step) if on_host else step for step in lane] for lane in lanes]

    def at(self, timestep: Tensor, context: TextContext) -> Modulations:
        """The modulations at `timestep` (0-dim; on the CPU, or this waits for the GPU) for one of the contexts."""
        lane = next(n for n, known in enumerate(self._contexts) if known is context)
        found = self._lanes[lane][self._index[float(timestep)]]
        return found.on(self._device) if isinstance(found, _OnHost) else found


class _OnHost:
    """The modulations of one forward as one piece of host memory, so that they travel in one copy."""

    def __init__(self, modulations: Modulations) -> None:
        leaves: list[Tensor] = []

        def noted(leaf: Tensor) -> Tensor:
            leaves.append(leaf)
            return torch.empty_like(leaf, device="meta")

        self._form = _mapped(modulations, noted)
        self._sizes = [leaf.numel() for leaf in leaves]
        self._flat = torch.cat([leaf.flatten() for leaf in leaves])

    def on(self, device: torch.device) -> Modulations:
        pieces = iter(self._flat.to(device).split(self._sizes))
        made: Modulations = _mapped(self._form, lambda like: next(pieces).view(like.shape))
        return made


def _mapped(of: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same lists and tuples with every tensor changed."""
    if isinstance(of, Tensor):
        return change(of)
    if isinstance(of, list):
        return [_mapped(part, change) for part in of]
    return of if of is None else type(of)(*(_mapped(part, change) for part in of))


@torch.no_grad()
def _table(
    model: Transformer,
    timesteps: Tensor,
    context: TextContext,
    audio: bool,
    device: torch.device,
    home: torch.device,
) -> list[Modulations]:
    B = context.pooled_video.shape[0]
    times = [
        model.time_vectors(timestep.to(device, torch.float32).expand(B), context, audio=audio) for timestep in timesteps
    ]
    tower_video, tower_audio = model.text_towers
    text_video, text_audio, blocks = [], [], []
    for block in tower_video:
        with _visiting(block, device):
            text_video.append([block.text_modulation(video) for video, _ in times])
    for block in tower_audio if audio else ():
        with _visiting(block, device):
            text_audio.append([block.text_modulation(sound) for _, sound in times])
    for fused in model.fused_blocks:
        with _visiting(fused, device):
            made = [fused.modulations(video, sound) for video, sound in times]
            blocks.append(_mapped(made, lambda x: x.to(home)))
    with _visiting(model.out_layer, device), _visiting(model.audio_out_layer, device):
        heads = [
            (model.out_layer.modulation(video), None if sound is None else model.audio_out_layer.modulation(sound))
            for video, sound in times
        ]

    def step(n: int) -> Modulations:
        towers = [[parts[n] for parts in tower] for tower in (text_video, text_audio)]
        whole = Modulations(towers[0], towers[1], [parts[n] for parts in blocks], *heads[n])
        moved: Modulations = _mapped(whole, lambda x: x.to(home))
        return moved

    return [step(n) for n in range(len(times))]


@contextmanager
def _visiting(module: nn.Module, device: torch.device) -> Iterator[None]:
    """The modulation weights of `module` on `device`, for as long as this lasts."""
    at_home = [(parameter, parameter.data) for part in modulation_layers(module) for parameter in part.parameters()]
    for parameter, data in at_home:
        parameter.data = data.to(device, non_blocking=True)
    try:
        yield
    finally:
        for parameter, data in at_home:
            parameter.data = data


def is_modulation(name: str) -> bool:
    """Whether a transformer's tensor of this name belongs to a modulation."""
    return any(part.endswith("modulation") for part in name.split("."))


def modulation_layers(module: nn.Module) -> Iterator[Modulation]:
    return (part for part in module.modules() if isinstance(part, Modulation))
