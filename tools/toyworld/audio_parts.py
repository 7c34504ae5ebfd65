"""The sound's parts: stock `MMAudioVAE` over log-mel pictures and stock `MMAudioVocoder`, both narrow."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from diffusers import MMAudioVAE, MMAudioVocoder
from torch import Tensor, nn

from tools.toyworld.render import sounds, to_device
from tools.toyworld.source import Pool, draw
from tools.toyworld.tracks import collate
from tools.toyworld.training import Average, Budget, Log, Step, adam, device, load_state, resume, save_state, set_rate

KL_WEIGHT = 3e-4
DECIBEL = 20 / math.log(10)
"""Decibels in one natural-logarithm unit of magnitude."""


def build_vae(scaling_factor: float = 1.0) -> MMAudioVAE:
    """The convolutions carry no normalisation of their own, so they start as the class expects: unit gain each."""
    vae = MMAudioVAE(
        hidden_channels=48, channel_multipliers=(1, 2, 2), layers_per_block=1, scaling_factor=scaling_factor
    )
    for module in vae.modules():
        if isinstance(module, nn.Conv1d):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.weight[0].numel()))
    return vae


def build_vocoder() -> MMAudioVocoder:
    vocoder = MMAudioVocoder(
        upsample_initial_channel=128,
        upsample_rates=(8, 4, 4, 4),
        upsample_kernel_sizes=(16, 8, 8, 8),
        resblock_kernel_sizes=(3, 7),
        resblock_dilation_sizes=((1, 3), (1, 3)),
    )
    for name, parameter in vocoder.named_parameters():
        if "resblocks" in name and "convs2" in name and name.endswith("weight"):
            nn.init.normal_(parameter, std=0.01)
    return vocoder


def waves(seed: int, start: int, count: int, place: torch.device, *, held_out: bool = False) -> Tensor:
    return sounds(to_device(collate(draw(seed, start, count, held_out=held_out).tracks), place))


@torch.no_grad()
def set_statistics(vae: MMAudioVAE, place: torch.device) -> None:
    """Mean and deviation of every mel band over the training set, which the class keeps as buffers."""
    mel = vae.mel_converter(waves(2, 0, 512 if place.type == "cuda" else 8, place))
    vae.vae.data_mean.copy_(mel.mean(dim=(0, 2), keepdim=True))
    vae.vae.data_std.copy_(mel.std(dim=(0, 2), keepdim=True))


@torch.no_grad()
def mel_error(vae: MMAudioVAE, count: int, place: torch.device) -> float:
    """Mean absolute log-mel difference of held-out clips, in dB."""
    wave = waves(7, 0, count, place, held_out=True)
    mel = vae.mel_converter(wave)
    return float((vae(wave).sample - mel).abs().mean()) * DECIBEL


def vae_loss(vae: MMAudioVAE, mel: Tensor) -> dict[str, Tensor]:
    mean, log_variance = vae.vae.encode(mel).chunk(2, dim=1)
    log_variance = log_variance.clamp(-30, 20)
    z = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
    error = vae.vae.decode(z) - mel
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    distance = error.abs().mean()
    total = distance + 0.1 * (error / vae.vae.data_std).square().mean() + KL_WEIGHT * kl
    return {"total": total, "decibel": distance * DECIBEL, "kl": kl}


def train_vae(out: Path, seconds: float, batch: int, state: Path | None = None, rate: float = 2e-3) -> None:
    """Train for `seconds`; write `audio.safetensors` and `audio.jsonl` to `out`."""
    seed = 200 if state is None else 201
    place = device()
    clips = Pool(seed, 8192 if place.type == "cuda" else 64, place).stream(batch, seed)
    torch.manual_seed(2)
    vae = build_vae().to(place)
    average = resume(state, vae) if state else None
    if average is None:
        set_statistics(vae, place)
        average = Average(vae, 0.998)
    average.decay = 0.998
    optimizer = adam(vae.parameters())
    train_step = Step(lambda batch: vae_loss(vae, batch["mel"]), vae.parameters(), [optimizer])
    log = Log(out / "audio.jsonl")
    budget, step = Budget(seconds), 0
    while not budget.over:
        with torch.no_grad():
            mel = vae.mel_converter(sounds(next(clips)))
        set_rate(optimizer, rate * budget.rate(step))
        values = train_step({"mel": mel})
        average.update(step)
        if step % (100 if place.type == "cuda" else 2) == 0:
            log(stage="audio", step=step, seconds=budget.spent, **{k: float(v) for k, v in values.items()})
        step += 1
    average.swap()
    with torch.no_grad():
        spread = float(vae.encode(waves(3, 0, 32, place)).latent_dist.mode().std())
    log(stage="audio", step=step, decibel=mel_error(vae, 64 if place.type == "cuda" else 4, place), deviation=spread)
    average.swap()
    save_state(out / "audio.safetensors", vae, average)


_RESOLUTIONS = ((512, 128), (2048, 512))


def spectral_loss(out: Tensor, target: Tensor) -> Tensor:
    """Difference of logarithmic magnitudes at two window lengths, down to some 40 dB below a full tone."""
    total = out.new_zeros(())
    for size, hop in _RESOLUTIONS:
        window = torch.hann_window(size, device=out.device)
        spectrum = torch.stft(torch.cat([out, target]), size, hop, window=window, return_complex=True)
        got, wanted = (torch.view_as_real(spectrum).square().sum(-1) + 1e-9).sqrt().add(size * 6e-4).log().chunk(2)
        total = total + (got - wanted).abs().mean()
    return total / len(_RESOLUTIONS)


def vocoder_loss(vocoder: MMAudioVocoder, vae: MMAudioVAE, mel: Tensor, wave: Tensor) -> dict[str, Tensor]:
    made = vocoder(mel).sample[:, 0]
    distance = (vae.mel_converter(made) - vae.mel_converter(wave)).abs().mean()
    # Sounds start on mel frames, where every tone passes zero: the mel picture determines the samples themselves.
    error = made - wave
    samples = 4 * error.abs().mean() + 20 * error.square().mean()
    total = samples + spectral_loss(made, wave) + 0.05 * distance
    return {"total": total, "decibel": distance * DECIBEL, "error": error.square().mean().sqrt()}


CROP = 64
"""Mel frames of one training piece; 0.74 seconds."""


def train_vocoder(
    out: Path, seconds: float, batch: int, audio: Path, state: Path | None = None, rate: float = 1.5e-3
) -> None:
    """Train on mel pictures, true ones and such as the audio VAE decodes; write `vocoder.safetensors`."""
    seed = 300 if state is None else 301
    place = device()
    clips = Pool(seed, 8192 if place.type == "cuda" else 64, place, bouncing=0.1).stream(batch, seed)
    torch.manual_seed(3)
    vae = build_vae().to(place)
    load_state(audio, vae)
    vocoder = build_vocoder().to(place)
    average = (resume(state, vocoder) if state else None) or Average(vocoder, 0.998)
    average.decay = 0.998
    optimizer = adam(vocoder.parameters())
    train_step = Step(
        lambda batch: vocoder_loss(vocoder, vae, batch["mel"], batch["wave"]), vocoder.parameters(), [optimizer]
    )
    log = Log(out / "vocoder.jsonl")
    picks = torch.Generator().manual_seed(seed)
    budget, step = Budget(seconds), 0
    while not budget.over:
        wave = sounds(next(clips))
        with torch.no_grad():
            mel = vae.mel_converter(wave)
            if step % 4:
                # Generated latents are a little off, so the vocoder meets latents that are, too.
                z = vae.encode(wave).latent_dist.mode()
                off = 0.3 * torch.rand(batch, 1, 1, device=place) * z.std()
                mel = vae.decode(z + off * torch.randn_like(z)).sample
        last = mel.shape[2] - CROP
        # A third each from the beginning, the end, and anywhere: the edges are heard, too.
        start = (0, last, int(torch.randint(last + 1, (1,), generator=picks)))[step % 3]
        part = {"mel": mel[:, :, start : start + CROP], "wave": wave[:, start * 512 : (start + CROP) * 512]}
        set_rate(optimizer, rate * budget.rate(step))
        values = train_step(part)
        average.update(step)
        if step % (50 if place.type == "cuda" else 2) == 0:
            log(stage="vocoder", step=step, seconds=budget.spent, **{k: float(v) for k, v in values.items()})
        step += 1
    save_state(out / "vocoder.safetensors", vocoder, average)


def load_vae(path: Path, scaling_factor: float = 1.0) -> MMAudioVAE:
    vae = build_vae(scaling_factor)
    load_state(path, vae)
    return vae.eval()


def load_vocoder(path: Path) -> MMAudioVocoder:
    vocoder = build_vocoder()
    load_state(path, vocoder)
    return vocoder.eval()
