"""The training programs: their arithmetic is the stock classes', their steps learn, their states are taken up again."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tools.toyworld import audio_parts, fast_flow, fast_vae, flow, video_vae
from tools.toyworld.muon import Muon, orthogonal
from tools.toyworld.pool import Features, Latents, video_latents
from tools.toyworld.source import Pool, draw
from tools.toyworld.training import Average, Budget, Step, adam, load_state, resume, save_state, set_rate
from torch import Tensor, nn


@pytest.fixture(scope="module")
def vae() -> nn.Module:
    torch.manual_seed(0)
    return video_vae.build().eval()


@pytest.fixture(scope="module")
def transformer() -> nn.Module:
    """The stock class with every weight at work: as built, gates are zero."""
    torch.manual_seed(0)
    model = flow.build()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.08)
    return model


@pytest.mark.parametrize("frames", [1, 5, 13])
def test_fast_encode_and_decode_are_the_stock_modules(vae: nn.Module, frames: int) -> None:
    x = torch.rand(2, 3, frames, 16, 24) * 2 - 1
    with torch.no_grad():
        mean, log_variance = fast_vae.encode(vae, x)
        posterior = vae.encode(x).latent_dist
        torch.testing.assert_close(mean, posterior.mean, rtol=0, atol=2e-4)
        torch.testing.assert_close(log_variance, posterior.logvar, rtol=0, atol=2e-4)
        torch.testing.assert_close(fast_vae.decode(vae, mean), vae.decode(mean).sample, rtol=0, atol=2e-4)


def test_fast_gradients_are_the_stock_modules(vae: nn.Module) -> None:
    x, weight = torch.rand(1, 3, 5, 16, 16) * 2 - 1, torch.randn(1, 3, 5, 16, 16)

    def gradients(out: Tensor) -> dict[str, Tensor]:
        vae.zero_grad()
        (out * weight).sum().backward()
        return {n: p.grad.clone() for n, p in vae.named_parameters() if p.grad is not None}

    stock = gradients(vae.decode(vae.encode(x).latent_dist.mode()).sample)
    fast = gradients(fast_vae.decode(vae, fast_vae.encode(vae, x)[0]))
    assert stock.keys() == fast.keys()
    for name, grad in stock.items():
        assert (grad - fast[name]).norm() <= 1e-3 * grad.norm() + 1e-3, name


def test_pool_latents_are_what_the_stock_windows_give(vae: nn.Module) -> None:
    frames = torch.rand(1, 3, 49, 16, 24) * 2 - 1
    with torch.no_grad():
        stock = vae.encode(frames).latent_dist.mode().movedim(1, -1)
        torch.testing.assert_close(video_latents(vae, frames), stock, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("sound", "image", "fused"), [(True, False, False), (True, True, False), (False, False, False)]
)
def test_fast_velocity_is_the_stock_modules(transformer: nn.Module, sound: bool, image: bool, fused: bool) -> None:
    B, T = 2, 3
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    places, types, three = torch.arange(T), None, None
    if image:
        places, types = torch.tensor([0, 1, 0]), torch.tensor([[0, 0, 1]] * B)
        three = (places, torch.arange(4), torch.arange(6))
    inputs = fast_flow.Inputs(
        video=torch.randn(B, T, 8, 12, 33),
        audio=torch.randn(B, 9, 40) if sound else None,
        text=torch.randn(B, 7, 96),
        mask=mask,
        pooled=torch.randn(B, 64),
        timestep=torch.tensor([900.0, 30.0]),
        frame_places=places,
        token_types=types,
    )
    with torch.no_grad():
        stock = transformer(
            hidden_states=inputs.video,
            audio_hidden_states=inputs.audio,
            encoder_hidden_states=inputs.text,
            encoder_attention_mask=mask,
            pooled_projections=inputs.pooled,
            timestep=inputs.timestep,
            visual_rope_pos=three,
            visual_token_type_ids=types,
            return_dict=False,
        )
        video, audio = fast_flow.velocity(transformer, inputs, torch.float32, fused)
    torch.testing.assert_close(video, stock[0], rtol=0, atol=2e-5)
    assert (audio is None) == (not sound)
    if audio is not None:
        torch.testing.assert_close(audio, stock[1], rtol=0, atol=2e-5)


def noise(*shape: int) -> Tensor:
    return torch.randn(2, *shape)


def test_the_transformer_learns_from_every_kind_of_batch() -> None:
    """It starts at 2, the deviation of noise and data together; steps on the same noise bring it down."""
    torch.manual_seed(0)
    data = Latents(noise(9, 4, 6, 16), noise(4, 6, 16), noise(4, 6, 16).abs(), noise(60, 40), 1.0, 1.0)
    words = Features(noise(6, 96), torch.ones(2, 6, dtype=torch.bool), noise(64))
    none = words.rows(torch.tensor([0]))
    model = flow.build()
    optimizers = flow.optimizers(model)

    def step(kind: str) -> dict[str, Tensor]:
        for optimizer in optimizers:
            set_rate(optimizer, 4e-3)
        torch.manual_seed(1)
        run = Step(
            lambda b: flow.flow_loss(model, data, words, none, kind, b["index"], torch.float32),
            model.parameters(),
            optimizers,
        )
        return run({"index": torch.arange(2)})

    first = step("text")
    assert float(first["video"]) == pytest.approx(2.0, abs=0.1)
    assert float(first["audio"]) == pytest.approx(2.0, abs=0.2)
    for kind in dict.fromkeys(flow.KINDS):
        assert ("audio" in step(kind)) == (kind != "mute")
    later = [step("text") for _ in range(3)][-1]
    assert float(later["video"]) < 0.9 * float(first["video"])
    assert float(later["audio"]) < 0.95 * float(first["audio"])


def test_the_sound_learns() -> None:
    torch.manual_seed(0)
    vae = audio_parts.build_vae()
    wave = audio_parts.waves(1, 0, 2, torch.device("cpu"))[:, : 512 * 24]
    mel = vae.mel_converter(wave)
    optimizer = adam(vae.parameters())
    step = Step(lambda b: audio_parts.vae_loss(vae, b["mel"]), vae.parameters(), [optimizer])
    set_rate(optimizer, 2e-3)
    losses = [float(step({"mel": mel})["total"]) for _ in range(8)]
    assert losses[-1] < 0.8 * losses[0]
    vocoder = audio_parts.build_vocoder()
    optimizer = adam(vocoder.parameters())
    step = Step(
        lambda b: audio_parts.vocoder_loss(vocoder, vae, b["mel"], b["wave"]), vocoder.parameters(), [optimizer]
    )
    set_rate(optimizer, 1e-3)
    losses = [float(step({"mel": mel, "wave": wave})["total"]) for _ in range(4)]
    assert losses[-1] < losses[0]


def test_muon_makes_directions_orthogonal_and_steps_as_large_as_adams() -> None:
    torch.manual_seed(0)
    for shape in ((3, 16, 16), (3, 32, 8), (3, 8, 32)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)).float())
        assert float(values.min()) > 0.5
        assert float(values.max()) < 1.4
    weights = [nn.Parameter(torch.randn(32, 32)) for _ in range(2)]
    idle = [nn.Parameter(torch.randn(8, 8))]
    before = [w.detach().clone() for w in (*weights, *idle)]
    muon = Muon([weights, idle])
    set_rate(muon, 0.1)
    for weight in weights:
        weight.grad = torch.randn(32, 32)
    muon.step()
    for weight, was in zip(weights, before, strict=False):
        assert float((weight.detach() - was).square().mean().sqrt()) == pytest.approx(0.1 * 0.2, rel=0.25)
    assert torch.equal(idle[0], before[2])


def test_a_budget_rises_holds_and_falls_to_nothing() -> None:
    budget = Budget(100.0, warmup_steps=10)
    assert budget.rate(0) == pytest.approx(0.1)
    assert budget.rate(50) == 1.0
    budget.started = time.monotonic() - 65
    assert 0.4 < budget.rate(50) < 0.6
    budget.started = time.monotonic() - 101
    assert budget.over
    assert budget.rate(50) == pytest.approx(0.0, abs=1e-6)


def test_a_state_is_taken_up_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(0)
    vocoder = audio_parts.build_vocoder()
    average = Average(vocoder, 0.9)
    with torch.no_grad():
        for parameter in vocoder.parameters():
            parameter.add_(1.0)
    average.update(100)
    save_state(tmp_path / "vocoder.safetensors", vocoder, average)
    again = audio_parts.build_vocoder()
    taken = resume(tmp_path / "vocoder.safetensors", again)
    assert taken is not None
    for kept, other in zip(average.kept, taken.kept, strict=True):
        torch.testing.assert_close(kept, other, rtol=0, atol=0)
    torch.testing.assert_close(again.state_dict(), vocoder.state_dict(), rtol=0, atol=0)
    load_state(tmp_path / "vocoder.safetensors", again)
    torch.testing.assert_close(list(again.parameters()), taken.kept, rtol=0, atol=0)
    assert resume(tmp_path / "nothing.safetensors", again) is None


def test_the_transformers_state_is_taken_up(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = flow.build()
    flow.save(tmp_path, model, Average(model, 0.9))
    assert all(file.stat().st_size < 2**24 for file in tmp_path.iterdir())
    again = flow.build()
    flow.resume(tmp_path, again)
    for (name, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0.01, atol=1e-6, msg=name)


def test_a_pool_holds_the_same_clips_as_the_source() -> None:
    pool, source = Pool(9, 12, "cpu"), draw(9, 0, 12)
    assert pool.captions == source.captions
    np.testing.assert_array_equal(pool.take(torch.tensor([7]))["x"][0].numpy(), source.tracks[7].x)
    first = next(pool.stream(4, 1))["x"]
    assert torch.equal(first, next(pool.stream(4, 1))["x"])
    assert not torch.equal(first, next(pool.stream(4, 2))["x"])
