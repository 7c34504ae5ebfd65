"""Schedules against diffusers' scheduler classes, float32."""

from __future__ import annotations

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, PiflowScheduler

from diptych.errors import CheckpointError
from diptych.sampling.schedules import FlowSchedule, PiFlowSchedule, schedule_for, shifted


@pytest.mark.parametrize("steps", [1, 2, 10, 16, 50, 73])
def test_flow_grid_equals_diffusers_bit_for_bit(steps):
    reference = FlowMatchEulerDiscreteScheduler(shift=5.0)
    reference.set_timesteps(steps)
    schedule = FlowSchedule(steps)
    assert torch.equal(schedule.timesteps, reference.timesteps)
    assert torch.equal(schedule.sigmas, reference.sigmas)


def test_flow_grid_has_the_published_values():
    first = [1000, 995.8716, 991.6046, 987.1918]
    last = [260.7619, 192.8036, 114.8195, 24.4141]
    timesteps = FlowSchedule(50).timesteps.tolist()
    assert timesteps[:4] == pytest.approx(first, abs=1e-3)
    assert timesteps[-4:] == pytest.approx(last, abs=1e-3)
    native = FlowSchedule(50, grid="native").sigmas
    assert native[-2].item() == pytest.approx(0.092593, abs=1e-6)
    assert native[0] == 1
    assert native[-1] == 0


def test_flow_steps_equal_diffusers_bit_for_bit():
    reference = FlowMatchEulerDiscreteScheduler(shift=5.0)
    reference.set_timesteps(12)
    schedule, x = FlowSchedule(12), torch.randn(1, 3, 4, 4, 16)
    y = x.clone()
    for index, t in enumerate(reference.timesteps):
        v = torch.randn_like(x)
        y = reference.step(v, t, y, return_dict=False)[0]
        x = schedule.step(index, x, v)
        assert torch.equal(x, y)


@pytest.mark.parametrize("steps", [1, 2, 4, 10, 20])
@pytest.mark.parametrize("channels", [16, 40])
def test_piflow_closed_form_equals_diffusers_rollout(steps, channels):
    """Against diffusers' rollout run in float64; in float32 that rollout itself strays by up to 1e-4."""
    reference = PiflowScheduler(shift=5.0)
    reference.set_timesteps(steps)
    schedule = PiFlowSchedule(steps)
    assert torch.equal(schedule.timesteps, reference.timesteps)
    reference._piflow_raw_timesteps = raw = reference._piflow_raw_timesteps.double()
    reference.sigmas = 5 * raw / (1 + 4 * raw)
    for index in range(steps):
        x, u = torch.randn(2, 7, channels), torch.randn(2, 7, channels * 10)
        expected = reference._policy_step(u.double(), x.double(), index)
        assert expected.dtype is torch.float64
        torch.testing.assert_close(schedule.step(index, x, u).double(), expected, atol=1e-6, rtol=0)


def test_a_whole_piflow_run_equals_diffusers_in_float32():
    reference = PiflowScheduler(shift=5.0)
    reference.set_timesteps(10)
    schedule, x = PiFlowSchedule(10), torch.randn(2, 7, 16)
    y = x.clone()
    for index, t in enumerate(reference.timesteps):
        u = torch.randn(2, 7, 160)
        y = reference.step(u, t, y, return_dict=False)[0]
        x = schedule.step(index, x, u)
    torch.testing.assert_close(x, y, atol=1e-5, rtol=0)


def test_piflow_weights_have_the_published_values():
    weights = PiFlowSchedule(10).weights
    assert sum(weights[0]) == pytest.approx(0.022989, abs=1e-6)
    assert weights[-1][1] == pytest.approx(0.7142, abs=1e-4)
    assert weights[-1][2] == pytest.approx(0.2857, abs=1e-4)


@pytest.mark.parametrize("schedule", [FlowSchedule(9), PiFlowSchedule(9)])
def test_a_true_velocity_leads_to_the_data(schedule):
    """With v = noise - data everywhere, any schedule ends at the data, and so does every clean estimate.

    PiFlow ends at raw time 1e-6, where 5e-6 of the noise is left.
    """
    data, noise = torch.randn(1, 5, 16), torch.randn(1, 5, 16)
    v = noise - data
    if isinstance(schedule, PiFlowSchedule):
        v = v.repeat(1, 1, 10)
    x = noise
    for index in range(9):
        torch.testing.assert_close(schedule.clean(index, x, v), data, atol=1e-5, rtol=0)
        x = schedule.step(index, x, v)
    left = shifted(schedule.eps, schedule.shift) if isinstance(schedule, PiFlowSchedule) else 0.0
    torch.testing.assert_close(x, data + left * (noise - data), atol=5e-6, rtol=0)


def test_config_decides_and_strange_schedulers_are_refused():
    flow = {"_class_name": "FlowMatchEulerDiscreteScheduler", **FlowMatchEulerDiscreteScheduler(shift=5.0).config}
    assert schedule_for(flow, 7, "native") == FlowSchedule(7, 5.0, "native")
    assert schedule_for(
        {"_class_name": "PiflowScheduler", **PiflowScheduler().config}, 7, "diffusers"
    ) == PiFlowSchedule(7)
    with pytest.raises(CheckpointError, match="use_karras_sigmas"):
        schedule_for({**flow, "use_karras_sigmas": True}, 7, "diffusers")
    with pytest.raises(CheckpointError, match="EulerDiscreteScheduler"):
        schedule_for({"_class_name": "EulerDiscreteScheduler"}, 7, "diffusers")
