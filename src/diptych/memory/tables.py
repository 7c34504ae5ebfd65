"""Modulation tables: all that time decides, computed once a request, so that its weights need no room on the GPU.

Modulation is 4.7 of Pro's 30.1 billion parameters and depends on nothing but timestep and pooled text. Its weights wait
in host memory and visit the device one block at a time, while all steps of a request are computed from them: the same
calls as in a step, so the results are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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
    17.7 MB a step and lane for Pro.
    """

    def __init__(self, model: Transformer, timesteps: Tensor, contexts: Sequence[TextContext], *, audio: bool) -> None:
        device = contexts[0].pooled_video.device
        self._index = {float(timestep): n for n, timestep in enumerate(timesteps.cpu())}
        self._contexts = list(contexts)
        self._lanes = [_table(model, timesteps, context, audio, device) for context in contexts]

    def at(self, timestep: Tensor, context: TextContext) -> Modulations:
        """The modulations at `timestep` (0-dim; on the CPU, or this waits for the GPU) for one of the contexts."""
        lane = next(n for n, known in enumerate(self._contexts) if known is context)
        return self._lanes[lane][self._index[float(timestep)]]


@torch.no_grad()
def _table(
    model: Transformer, timesteps: Tensor, context: TextContext, audio: bool, device: torch.device
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
            blocks.append([fused.modulations(video, sound) for video, sound in times])
    with _visiting(model.out_layer, device), _visiting(model.audio_out_layer, device):
        heads = [
            (model.out_layer.modulation(video), None if sound is None else model.audio_out_layer.modulation(sound))
            for video, sound in times
        ]

    def step(n: int) -> Modulations:
        towers = [[parts[n] for parts in tower] for tower in (text_video, text_audio)]
        return Modulations(towers[0], towers[1], [parts[n] for parts in blocks], *heads[n])

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


def modulation_layers(module: nn.Module) -> Iterator[Modulation]:
    return (part for part in module.modules() if isinstance(part, Modulation))
