"""The transformer: the stock class, small, trained by flow matching on the latents of a pool of clips.

x_t = (1 - sigma) x0 + sigma noise, the target is noise - x0, the timestep is 1000 sigma, the same for picture and
sound. One caption in ten is replaced by the default negative prompt, which is what guidance steers away from.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from diffusers import Kandinsky6Transformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from diptych.bench.score import MEASURES
from diptych.media.files import replacing
from diptych.sampling.schedules import FlowSchedule
from tools.toyworld import audio_parts, video_vae
from tools.toyworld.fast_flow import Inputs, velocity
from tools.toyworld.judging import Parts, judge_many, judges
from tools.toyworld.muon import Muon
from tools.toyworld.pool import (
    AUDIO_CHANNELS,
    VIDEO_CHANNELS,
    Features,
    Latents,
    features,
    latents,
)
from tools.toyworld.source import Pool
from tools.toyworld.team import Team
from tools.toyworld.text import POOLED, WIDTH
from tools.toyworld.training import Average, Budget, Log, Step, adam, kernels_agree, set_rate

CONFIG: dict[str, Any] = {
    "in_visual_dim": VIDEO_CHANNELS,
    "out_visual_dim": VIDEO_CHANNELS,
    "in_audio_dim": AUDIO_CHANNELS,
    "out_audio_dim": AUDIO_CHANNELS,
    "in_text_dim": WIDTH,
    "in_text_dim2": POOLED,
    "time_dim": 64,
    "model_dim": 192,
    "ff_dim": 576,
    "time_dim_a": 64,
    "model_dim_a": 96,
    "ff_dim_a": 288,
    "num_text_blocks": 2,
    "num_visual_blocks": 6,
    "axes_dims": [8, 12, 12],
    "axes_dims_a": [8, 12, 12],
    "audio_freqs_scaling": 0.144,
    "scale_factor": [1.0, 2.0, 2.0],
    "patch_size": [1, 2, 2],
    "visual_cond": True,
    "text_token_padding": True,
    "ca_rope": True,
    "cross_gates": True,
    "fix_modulation": True,
    "visual_token_type_num_embeddings": 2,
}
SHIFT = 3.0
"""Of the noise levels in training; sigma = 3u / (1 + 2u) for u uniform on 0..1."""
AUDIO_SHARE = 0.6
"""Weight of the audio's error beside the video's."""
DROPOUT = 0.1
BOUNCING = 0.2
"""Share of the pool that bounces for certain, beyond the tenth of all: picture and sound have to meet there."""
SAVE_SECONDS = 60.0
SHORT_FRAMES, SHORT_AUDIO = 7, 45
"""Latents of the 25-frame clips that some batches are cut to."""
KINDS = ("text", "text", "image", "text", "short", "image", "text", "text", "image", "mute")
"""Each batch is of one kind, in turn: from text; from text and image; 25 frames; picture alone."""


def build() -> Kandinsky6Transformer3DModel:
    """The stock class; modulations and heads start at zero, so every block starts as the identity."""
    model = Kandinsky6Transformer3DModel(**CONFIG)
    for name, parameter in model.named_parameters():
        if "modulation" in name or name.startswith(("out_layer.out_layer", "audio_out_layer.out_layer")):
            nn.init.zeros_(parameter)
        elif name == "visual_token_type_embeddings.weight":
            nn.init.normal_(parameter, std=0.02)
    return model


def clean(data: Latents, kind: str, index: Tensor) -> tuple[Tensor, Tensor]:
    """Latents of clips of the pool in float32, cut to 25 frames where the batch is of short clips."""
    video, audio = data.video[index].float(), data.audio[index].float()
    return (video[:, :SHORT_FRAMES], audio[:, :SHORT_AUDIO]) if kind == "short" else (video, audio)


def first_frames(data: Latents, index: Tensor) -> Tensor:
    """Latents (B, Y, X, C) of clips' first frames as reference images, drawn from the encoder's posterior."""
    spread = data.first_spread[index].float()
    return data.first[index].float() + spread * torch.randn_like(spread)


def model_inputs(video: Tensor, audio: Tensor | None, text: Features, sigma: Tensor, tail: Tensor | None) -> Inputs:
    """What the transformer reads of noisy latents at noise level sigma (B,); tail: reference frame behind the video."""
    B, T = video.shape[:2]
    types, places = None, torch.arange(T, device=video.device)
    marked = torch.zeros_like(video[..., :1])
    if tail is not None:
        video = torch.cat([video, tail[:, None]], dim=1)
        marked = torch.cat([marked, torch.ones_like(marked[:, :1])], dim=1)
        types = torch.zeros(B, T + 1, dtype=torch.long, device=video.device)
        types[:, -1] = 1
        places = torch.cat([places, torch.zeros_like(places[:1])])
    return Inputs(
        video=torch.cat([video, torch.zeros_like(video), marked], dim=-1),
        audio=audio,
        text=text.hidden,
        mask=text.mask,
        pooled=text.pooled,
        timestep=1000 * sigma,
        frame_places=places,
        token_types=types,
    )


def flow_loss(
    model: nn.Module,
    data: Latents,
    text: Features,
    none: Features,
    kind: str,
    index: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    fused: bool = False,
) -> dict[str, Tensor]:
    """Mean squared error of the velocity, for the clips `index` of the pool. fused: by `tools.toyworld.fused`."""
    B, place = len(index), index.device
    video, audio = clean(data, kind, index)
    u = torch.rand(B, device=place)
    sigma = SHIFT * u / (1 + (SHIFT - 1) * u)
    video_noise, audio_noise = torch.randn_like(video), torch.randn_like(audio)
    noisy = video + sigma[:, None, None, None, None] * (video_noise - video)
    noisy_audio = audio + sigma[:, None, None] * (audio_noise - audio)
    dropped = torch.rand(B, device=place) < DROPOUT
    mine = text.rows(index)
    chosen = Features(
        torch.where(dropped[:, None, None], none.hidden, mine.hidden),
        torch.where(dropped[:, None], none.mask, mine.mask),
        torch.where(dropped[:, None], none.pooled, mine.pooled),
    )
    tail = first_frames(data, index) if kind == "image" else None
    inputs = model_inputs(noisy, None if kind == "mute" else noisy_audio, chosen, sigma, tail)
    out = velocity(model, inputs, dtype, fused)
    video_loss = (out[0][:, : video.shape[1]].float() - (video_noise - video)).square().mean()
    values = {"total": video_loss, "video": video_loss}
    if out[1] is not None:
        values["audio"] = (out[1].float() - (audio_noise - audio)).square().mean()
        values["total"] = video_loss + AUDIO_SHARE * values["audio"]
    return values


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, Adam for modulations, embeddings, heads and vectors."""
    groups: dict[tuple[torch.Size, bool], list[Tensor]] = defaultdict(list)
    rest = []
    for name, parameter in model.named_parameters():
        if "blocks." in name and "modulation" not in name and parameter.ndim == 2:
            groups[parameter.shape, "video_" in name].append(parameter)
        else:
            rest.append(parameter)
    return [Muon(list(groups.values()), share=2.0), adam(rest)]


def train(
    out: Path,
    seconds: float,
    batch: int,
    *,
    text: Path,
    video: Path,
    audio: Path,
    clips: int = 32768,
    encode_seconds: float = 30.0,
    state: Path | None = None,
    rate: float = 1.5e-3,
    finish_after: float | None = None,
    wait_for: Path | None = None,
    vocoder: Path | None = None,
    plain: bool = False,
    fused: bool = True,
) -> None:
    """Train for `seconds`; write `flow.safetensors` (averaged weights), `flow_raw.safetensors` and `flow.jsonl`.

    plain: launch every kernel anew, where a recording fails. fused: our own kernels on a GPU, else torch's.
    vocoder: its weights; when given, clips of held-out prompts are made and judged at the end.
    finish_after: seconds from the start of this function at which training ends at the latest.
    wait_for: a file whose appearance says that `video` is ready; until then all that needs no GPU time is prepared.
    """
    born = time.monotonic()
    rank = int(os.environ.get("RANK", "0"))
    seed = (400 if state is None else 400 + int(time.time()) % 1000) + 10_000 * rank
    pool = Pool(seed, clips, "cpu", BOUNCING)  # forks, so before any GPU is touched
    team = Team.join()
    place = team.place
    pool.to(place)
    log = Log(out / "flow.jsonl") if rank == 0 else (lambda **values: None)
    words, none = features(text, pool.captions, place)
    torch.manual_seed(400)
    model = build().to(place)
    average = resume(state, model) if state else Average(model, 0.999)
    torch.manual_seed(seed)
    while wait_for is not None and not wait_for.exists():
        time.sleep(0.2)
    started = time.monotonic()
    vaes = video_vae.load(video).to(place), audio_parts.load_vae(audio).to(place)
    data = latents(*vaes, pool, place, encode_seconds, team.agree)
    count = len(data.video)
    log(stage="flow", clips=count, seconds=time.monotonic() - started, factors=[data.video_factor, data.audio_factor])
    if rank == 0:
        (out / "factors.txt").write_text(f"{data.video_factor:.6f} {data.audio_factor:.6f}\n")

    fused = fused and place.type == "cuda"
    if fused:
        some = torch.arange(16, device=place)
        fused = kernels_agree(
            lambda ours: flow_loss(model, data, words, none, "image", some, fused=ours)["total"],
            model.parameters(),
            log,
        )
        torch.manual_seed(seed)
    both = optimizers(model)
    memory = torch.cuda.graph_pool_handle() if place.type == "cuda" else None

    def kind_of_step(kind: str) -> Step:
        def loss(values: dict[str, Tensor]) -> dict[str, Tensor]:
            return flow_loss(model, data, words, none, kind, values["index"], fused=fused)

        return Step(loss, model.parameters(), both, team.share, memory, record=not plain)

    steps = {kind: kind_of_step(kind) for kind in dict.fromkeys(KINDS)}
    if finish_after is not None:
        seconds = min(seconds, born + finish_after - time.monotonic())
    budget, step, saved = Budget(seconds, warmup_steps=200), 0, 0.0
    report_every = 100 if place.type == "cuda" else 1
    order, at = torch.randperm(count, device=place), 0
    while True:
        # One clock for all: a rate of its own would lead each process's weights elsewhere.
        now, over, part = team.agree(budget.spent, budget.over, budget.rate(step))
        if over:
            break
        if at + batch > count:
            order, at = torch.randperm(count, device=place), 0
        kind = KINDS[step % len(KINDS)]
        for optimizer in both:
            set_rate(optimizer, rate * part)
        values = steps[kind]({"index": order[at : at + batch]})
        average.update(step)
        if step % report_every in (0, 2) and kind in ("text", "image"):
            log(stage="flow", kind=kind, step=step, seconds=now, **{k: float(v) for k, v in values.items()})
        if now - saved > SAVE_SECONDS:
            saved = now
            if rank == 0:
                save(out, model, average)
        at += batch
        step += 1
    log(stage="flow", step=step, seconds=budget.spent)
    team.leave()
    if rank > 0:
        return
    save(out, model, average)
    if vocoder is not None:
        average.swap()
        parts = Parts.load(model, video, audio, vocoder, data.video_factor, data.audio_factor, place)
        schedule, clips = FlowSchedule(20, SHIFT), 64 if place.type == "cuda" else 2
        with judges(clips) as readers:
            for guidance in (3.0, 1.0, 5.0):
                found = judge_many(parts, text, clips, schedule, readers, guidance=guidance)
                shares = {name: round(found.share(name), 3) for name in MEASURES}
                log(stage="score", guidance=guidance, total=found.total, **shares)
                wrong = [
                    f"{v.scene.key} {v.picture.color}/{v.picture.shape}/{v.picture.motion}"
                    for v in found.verdicts
                    if v.mean < 1
                ]
                log(stage="score", guidance=guidance, wrong=wrong)


def resume(state: Path, model: nn.Module, name: str = "flow") -> Average:
    """Take up what `save` wrote to the folder `state`."""
    average = Average(model, 0.999)
    for file, tensors in ((name, average.kept), (f"{name}_raw", average.live)):
        stored = load_file(state / f"{file}.safetensors")
        for (key, _), tensor in zip(model.named_parameters(), tensors, strict=True):
            tensor.data.copy_(stored[key])
    return average


def resume_average(path: Path, model: nn.Module) -> None:
    """Put the averaged weights of a state into the model."""
    stored = load_file(path)
    model.load_state_dict({name: tensor.float() for name, tensor in stored.items()}, strict=True)


def save(out: Path, model: nn.Module, average: Average, name: str = "flow") -> None:
    """Averaged weights as they are exported, and live ones to go on from; each below 16 MiB, and each whole
    or as it was where the run is cut off."""
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    for file, tensors in ((name, average.kept), (f"{name}_raw", average.live)):
        kept = {n: t.detach().to("cpu", torch.bfloat16).contiguous() for n, t in zip(names, tensors, strict=True)}
        with replacing(out / f"{file}.safetensors") as part:
            save_file(kept, part)
