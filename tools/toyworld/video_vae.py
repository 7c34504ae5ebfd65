"""The video VAE: stock `AutoencoderKLHunyuanVideo`, narrow, with the released compression of 8 x 8 x 4."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKLHunyuanVideo
from torch import Tensor

from tools.toyworld.render import pictures
from tools.toyworld.source import Pool, draw
from tools.toyworld.training import Average, Budget, Log, adam, device, load_state, resume, save_state, set_rate

KL_WEIGHT = 5e-4
WINDOW = 17
"""Frames of one window of diffusers' windowed encode and decode; the next one starts 12 frames later."""
STRIDE = 12


def build(scaling_factor: float = 1.0) -> AutoencoderKLHunyuanVideo:
    return AutoencoderKLHunyuanVideo(
        block_out_channels=(16, 32, 48, 48),
        layers_per_block=1,
        norm_num_groups=8,
        scaling_factor=scaling_factor,
    )


def windows_loss(vae: AutoencoderKLHunyuanVideo, frames: Tensor) -> tuple[Tensor, Tensor]:
    """Reconstruction of 29 or 25 frames through two neighbouring windows, exactly as diffusers cuts them.

    The second window is decoded from latents of both encoder windows, and its first frame is dropped, so the decoder
    learns the seam it will be used with. Returns reconstruction loss and mean KL per latent element.
    """
    first, second = frames[:, :, :WINDOW], frames[:, :, STRIDE:]
    if second.shape[2] == WINDOW:
        posterior = vae.encode(torch.cat([first, second])).latent_dist
        z = posterior.sample()
        z_first, z_second = z.chunk(2)
        z_next = torch.cat([z_first[:, :, 3:5], z_second[:, :, 2:]], dim=2)
        out_first, out_second = vae.decode(torch.cat([z_first, z_next])).sample.chunk(2)
        kl = posterior.kl().mean() / z[0].numel()
    else:
        posterior, other = vae.encode(first).latent_dist, vae.encode(second).latent_dist
        z_first, z_second = posterior.sample(), other.sample()
        z_next = torch.cat([z_first[:, :, 3:5], z_second[:, :, 2:]], dim=2)
        out_first, out_second = vae.decode(z_first).sample, vae.decode(z_next).sample
        kl = posterior.kl().mean() / z_first[0].numel()
    out = torch.cat([out_first, out_second[:, :, 1:]], dim=2)
    return _distance(out, torch.cat([first, second[:, :, 1:]], dim=2)), kl


def _distance(out: Tensor, target: Tensor) -> Tensor:
    error = out.float() - target
    return error.abs().mean() + 5 * error.square().mean()


def image_loss(vae: AutoencoderKLHunyuanVideo, frames: Tensor) -> Tensor:
    """Reconstruction of single frames: reference images are encoded alone."""
    z = vae.encode(frames).latent_dist.sample()
    return _distance(vae.decode(z).sample, frames)


@torch.no_grad()
def psnr(vae: AutoencoderKLHunyuanVideo, count: int, place: torch.device, batch: int = 16) -> float:
    """Mean PSNR in dB over held-out 49-frame clips, through diffusers' own windowed encode and decode, on 0..1."""
    values = []
    for start in range(0, count, batch):
        frames, _ = draw(7, start, min(batch, count - start), held_out=True).render(place)
        out = vae.decode(vae.encode(frames.to(vae.dtype)).latent_dist.mode()).sample.clamp(-1, 1)
        values.append(-10 * torch.log10((out.float() - frames).square().mean(dim=(1, 2, 3, 4)) / 4))
    return float(torch.cat(values).mean())


@torch.no_grad()
def latent_deviation(vae: AutoencoderKLHunyuanVideo, count: int, place: torch.device) -> float:
    frames, _ = draw(3, 0, count).render(place)
    return float(vae.encode(frames).latent_dist.mode().std())


def train(out: Path, seconds: float, batch: int, state: Path | None = None, rate: float = 1.5e-3) -> None:
    """Train for `seconds`; write `video.safetensors` and `video.jsonl` to `out`."""
    seed = 100 if state is None else 101
    place = device()
    clips = Pool(seed, 8192 if place.type == "cuda" else 64, place).stream(batch, seed)
    torch.manual_seed(1)
    vae = build().to(place)
    average = (resume(state, vae) if state else None) or Average(vae, 0.998)
    average.decay = 0.998
    optimizer = adam(vae.parameters(), rate)
    budget, log, step = Budget(seconds), Log(out / "video.jsonl"), 0
    picks = torch.Generator().manual_seed(seed)
    report_every = 100 if place.type == "cuda" else 2
    while not budget.over:
        frames = pictures(next(clips))
        length = 25 if step % 5 == 4 else 29
        start = int(torch.randint(49 - length + 1, (1,), generator=picks))
        set_rate(optimizer, rate * budget.rate(step))
        with torch.autocast(place.type, torch.bfloat16):
            rebuilt, kl = windows_loss(vae, frames[:, :, start : start + length])
            single = image_loss(vae, frames[:, :, start + length - 1 :][:, :, :1])
        loss = rebuilt + 0.15 * single + KL_WEIGHT * kl
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        average.update(step)
        if step % report_every == 0:
            values = {"loss": float(rebuilt.detach()), "image": float(single.detach()), "kl": float(kl.detach())}
            log(stage="video", step=step, seconds=budget.spent, **values)
        if step % 1000 == 999:
            save_state(out / "video.safetensors", vae, average)
        step += 1
    average.swap()
    vae.eval()
    count = 64 if place.type == "cuda" else 2
    log(stage="video", step=step, psnr=psnr(vae, count, place), deviation=latent_deviation(vae, count, place))
    average.swap()
    save_state(out / "video.safetensors", vae, average)


def load(path: Path, scaling_factor: float = 1.0) -> AutoencoderKLHunyuanVideo:
    vae = build(scaling_factor)
    load_state(path, vae)
    return vae.eval()
