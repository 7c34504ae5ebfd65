"""When the transformer is asked, and what a step does with its answer; no state, so a schedule serves any request.

Both schedules keep latents in float32 from the first step to the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diptych.errors import CheckpointError
from diptych.request import SigmaGrid

TRAIN_STEPS = 1000


class Schedule(Protocol):
    """timesteps (N,) float32 on the CPU, descending from 1000.

    `step` takes x at step `index` (any shape, float32, channels last) and the velocity there, and returns x at the
    next; `clean` returns the present estimate of the finished latents.
    """

    @property
    def timesteps(self) -> Tensor: ...
    def step(self, index: int, x: Tensor, velocity: Tensor) -> Tensor: ...
    def clean(self, index: int, x: Tensor, velocity: Tensor) -> Tensor: ...


def shifted(u: Any, shift: float) -> Any:
    """Resolution shift of the noise scale: s u / (1 + (s - 1) u)."""
    return shift * u / (1 + (shift - 1) * u)


@dataclass(frozen=True)
class FlowSchedule:
    """Flow-matching Euler: x <- x + (sigma' - sigma) v.

    The two published grids differ by up to 0.07 in sigma at the end: `diffusers` applies the shift twice to its last
    point, `native` is the plain linspace(1, 0, N + 1).
    """

    steps: int
    shift: float = 5.0
    grid: SigmaGrid = "diffusers"

    @cached_property
    def sigmas(self) -> Tensor:
        """(N + 1,) float32, from 1 to 0."""
        if self.grid == "native":
            values = shifted(np.linspace(1.0, 0.0, self.steps + 1), self.shift)
            return torch.from_numpy(values).float()
        train = torch.arange(1, TRAIN_STEPS + 1, dtype=torch.float32) / TRAIN_STEPS
        ends = shifted(train, self.shift)[[-1, 0]].tolist()
        u = np.linspace(ends[0] * TRAIN_STEPS, ends[1] * TRAIN_STEPS, self.steps) / TRAIN_STEPS
        return torch.cat([torch.from_numpy(shifted(u, self.shift)).float(), torch.zeros(1)])

    @property
    def timesteps(self) -> Tensor:
        return self.sigmas[:-1] * TRAIN_STEPS

    def step(self, index: int, x: Tensor, velocity: Tensor) -> Tensor:
        delta = (self.sigmas[index + 1] - self.sigmas[index]).item()
        return x + delta * velocity.float()

    def clean(self, index: int, x: Tensor, velocity: Tensor) -> Tensor:
        return x - self.sigmas[index].item() * velocity.float()


class Substep(NamedTuple):
    """Where the rollout of a segment stands: at x = x_s - sigma_s * sum_k passed_k u_k, with noise of level sigma.

    The policy's clean latents there are x_s - sigma_s * sum_k here_k u_k.
    """

    sigma: float
    passed: npt.NDArray[np.float64]
    here: npt.NDArray[np.float64]


@dataclass(frozen=True)
class PiFlowSchedule:
    """PiFlow of the distilled checkpoints: one forward predicts `n_grid` velocities, a policy rolls them out.

    The rollout is linear in the predictions, so a whole segment is
    `x_e = x_s - sigma_s * sum_k w_k u_k`: ten scalars stand for up to thirteen substeps over the latents.
    """

    steps: int
    shift: float = 5.0
    n_grid: int = 10
    eps: float = 1e-6
    final_step_size_scale: float = 0.5
    num_policy_substeps: int = 128

    @cached_property
    def raw(self) -> Tensor:
        """Unshifted times (N,) float32, descending from 1."""
        segment = 1.0 / (self.steps - (1.0 - self.final_step_size_scale))
        return 1.0 - torch.arange(self.steps, dtype=torch.float32) * segment

    @cached_property
    def timesteps(self) -> Tensor:
        times: Tensor = shifted(self.raw, self.shift) * TRAIN_STEPS
        return times

    @cached_property
    def weights(self) -> list[list[float]]:
        """w_k of each segment, in float64; their sum is 1 - sigma_e / sigma_s."""
        return [self.rollout(index)[-1].passed.tolist() for index in range(self.steps)]

    def rollout(self, index: int) -> list[Substep]:
        """The substeps of a segment, from its start; the last is its end, where the policy is not asked again."""
        start, end = [*self.raw.double().tolist(), self.eps][index : index + 2]
        substeps = max(1, round((start - end) * self.num_policy_substeps))
        size = (start - end) / substeps
        passed, r, found = np.zeros(self.n_grid), start, []
        for last in [False] * substeps + [True]:
            sigma, after = shifted(r, self.shift), shifted(max(r - size, 0.0), self.shift)
            place = min(max((r - end) / max(start - end, self.eps), 0.0), 1.0) * (self.n_grid - 1)
            low = min(int(place), self.n_grid - 2)
            here = np.zeros(self.n_grid)
            here[low], here[low + 1] = low + 1 - place, place - low
            found.append(Substep(sigma, passed, here))
            if not last:
                kept = 1 + (after - sigma) / max(sigma, self.eps)
                passed = kept * passed + (1 - kept) * here
                r -= size
        return found

    def _grid(self, velocity: Tensor) -> Tensor:
        return velocity.float().reshape(*velocity.shape[:-1], self.n_grid, -1)

    def step(self, index: int, x: Tensor, velocity: Tensor) -> Tensor:
        weights = torch.tensor(self.weights[index], dtype=torch.float32, device=x.device)
        sigma = self.timesteps[index].item() / TRAIN_STEPS
        return x - sigma * (self._grid(velocity) * weights[:, None]).sum(-2)

    def clean(self, index: int, x: Tensor, velocity: Tensor) -> Tensor:
        sigma = self.timesteps[index].item() / TRAIN_STEPS
        return x - sigma * self._grid(velocity)[..., 0, :]  # grid point 0 is the end of the segment


_FLOW_DEFAULTS = {
    "num_train_timesteps": TRAIN_STEPS,
    "use_dynamic_shifting": False,
    "invert_sigmas": False,
    "shift_terminal": None,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "stochastic_sampling": False,
}


def schedule_for(config: dict[str, Any], steps: int, grid: SigmaGrid) -> FlowSchedule | PiFlowSchedule:
    """The schedule that a checkpoint's scheduler_config.json asks for.

    Raises `CheckpointError` for a scheduler class or an option that Kandinsky 6 does not use.
    """
    kind = config.get("_class_name")
    if kind == "PiflowScheduler":
        names = ("shift", "n_grid", "eps", "final_step_size_scale", "num_policy_substeps")
        return PiFlowSchedule(steps, **{name: config[name] for name in names if name in config})
    if kind != "FlowMatchEulerDiscreteScheduler":
        raise CheckpointError(
            f"scheduler _class_name = {kind!r} is not accepted: FlowMatchEulerDiscreteScheduler or PiflowScheduler"
        )
    for name, value in _FLOW_DEFAULTS.items():
        if config.get(name, value) not in (value, None):
            raise CheckpointError(f"scheduler {name} = {config[name]!r} is not accepted: Kandinsky 6 uses {value!r}")
    return FlowSchedule(steps, float(config.get("shift", 1.0)), grid)
