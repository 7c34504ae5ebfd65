"""The video VAE: stock `AutoencoderKLHunyuanVideo`, narrow, with the released compression of 8 x 8 x 4."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLHunyuanVideo
from torch import Tensor

from tools.toyworld import fast_vae
from tools.toyworld.fast_vae import decode, encode
from tools.toyworld.render import pictures
from tools.toyworld.source import Pool, draw
from tools.toyworld.training import (
    Average,
    Budget,
    Log,
    Step,
    adam,
    device,
    kernels_agree,
    load_state,
    resume,
    save_state,
    set_rate,
)

KL_WEIGHT = 1e-3
SHAPE_WEIGHT = 6.0
"""A shape covers a few pixels in a hundred: without it, small errors of the wall outweigh a shape in a wrong colour."""
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


def windows_loss(vae: AutoencoderKLHunyuanVideo, frames: Tensor, shapes: Tensor) -> dict[str, Tensor]:
    """Reconstruction of 29 or 25 frames through two neighbouring windows, as diffusers cuts them, and of one image.

    The second window is decoded from latents of both encoder windows, and its first frame is dropped, so the decoder
    learns the seam it will be used with. Reference images are encoded alone, so one frame of each clip is, too.
    shapes: (B, 1, F, H, W), 1 on and around the shapes, which count `SHAPE_WEIGHT` times as much as the rest.
    """
    frames_bf = frames.bfloat16()
    first, second = frames_bf[:, :, :WINDOW], frames_bf[:, :, STRIDE:]
    B = len(frames)
    if second.shape[2] == WINDOW:
        mean, log_variance = encode(vae, torch.cat([first, second]))
        z = _sample(mean, log_variance)
        z_next = torch.cat([z[:B, :, 3:5], z[B:, :, 2:]], dim=2)
        out_first, out_second = decode(vae, torch.cat([z[:B], z_next])).chunk(2)
    else:
        mean, log_variance = encode(vae, first)
        z, z_second = _sample(mean, log_variance), _sample(*encode(vae, second))
        out_first = decode(vae, z)
        out_second = decode(vae, torch.cat([z[:, :, 3:5], z_second[:, :, 2:]], dim=2))
    out = torch.cat([out_first, out_second[:, :, 1:]], dim=2)
    weight = 1 + (SHAPE_WEIGHT - 1) * shapes
    error = out.float() - torch.cat([frames[:, :, :WINDOW], frames[:, :, STRIDE + 1 :]], dim=2)
    both = torch.cat([weight[:, :, :WINDOW], weight[:, :, STRIDE + 1 :]], dim=2)
    image = frames_bf[:, :, -1:]
    image_error = decode(vae, _sample(*encode(vae, image))).float() - frames[:, :, -1:]
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    total = _distance(error, both) + 0.15 * _distance(image_error, weight[:, :, -1:]) + KL_WEIGHT * kl
    return {"total": total, "mse": error.square().mean(), "image_mse": image_error.square().mean(), "kl": kl}


def _sample(mean: Tensor, log_variance: Tensor) -> Tensor:
    return (mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)).bfloat16()


def _distance(error: Tensor, weight: Tensor) -> Tensor:
    return (weight * (error.abs() + 5 * error.square())).mean()


@torch.no_grad()
def piece(track: dict[str, Tensor], start: int, length: int) -> dict[str, Tensor]:
    """Frames (B, 3, F, H, W) of clips, and where shapes are in them (B, 1, F, H, W), three pixels around included."""
    moving = ("x", "y", "radius", "angle")
    cut = track | {name: track[name][:, start : start + length] for name in moving}
    empty = cut | {name: torch.zeros_like(cut[name]) for name in ("radius", "other_radius")}
    frames = pictures(cut)
    away = (frames - pictures(empty)).abs().amax(1).gt(0.05).float()
    return {"frames": frames, "shapes": F.max_pool2d(away, 7, 1, 3)[:, None]}


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
    seed = 100 if state is None else 100 + int(time.time()) % 1000
    place = device()
    # Fast turns are the hardest to draw.
    clips = Pool(seed, 16384 if place.type == "cuda" else 64, place, bouncing=0.3).stream(batch, seed)
    torch.manual_seed(1)
    vae = build().to(place)
    average = (resume(state, vae) if state else None) or Average(vae, 0.998)
    average.decay = 0.998
    log = Log(out / "video.jsonl")
    optimizer = adam(vae.parameters())
    if place.type == "cuda":
        some = piece(next(clips), 0, 29)

        def checked(ours: bool) -> Tensor:
            fast_vae.FUSED = ours
            return windows_loss(vae, **some)["total"]

        fast_vae.FUSED = kernels_agree(checked, vae.parameters(), log)
    steps = [Step(lambda batch: windows_loss(vae, **batch), vae.parameters(), [optimizer]) for _ in range(2)]
    picks = torch.Generator().manual_seed(seed)
    report_every = 200 if place.type == "cuda" else 2
    budget, step = Budget(seconds), 0
    while not budget.over:
        length, part = (25, 1) if step % 5 == 4 else (29, 0)
        start = int(torch.randint(49 - length + 1, (1,), generator=picks))
        inputs = piece(next(clips), start, length)
        set_rate(optimizer, rate * budget.rate(step))
        values = steps[part](inputs)
        average.update(step)
        if step % report_every == 0:
            log(stage="video", step=step, seconds=budget.spent, **{k: float(v) for k, v in values.items()})
        if step % 1000 == 999:
            save_state(out / "video.safetensors", vae, average)
        step += 1
    average.swap()
    vae.eval()
    count = 32 if place.type == "cuda" else 2
    log(stage="video", step=step, psnr=psnr(vae, count, place), deviation=latent_deviation(vae, count, place))
    average.swap()
    save_state(out / "video.safetensors", vae, average)


def load(path: Path, scaling_factor: float = 1.0) -> AutoencoderKLHunyuanVideo:
    vae = build(scaling_factor)
    load_state(path, vae)
    return vae.eval()
