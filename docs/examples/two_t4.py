"""A clip with Lite on two 16 GB cards without bfloat16, such as a notebook's two T4 (without GPUs: on CPU processes):

torchrun --nproc-per-node 2 docs/examples/two_t4.py kandinskylab/Kandinsky-6.0-Lite-distill-5s-Diffusers

Only one model is in memory at a time: each is read straight to the card when its turn comes and freed afterwards, so
that the host needs memory for none of them. What each stage will take is printed first, from the headers of the weight
files, and a card that is too small is refused before a weight is read.
"""

import argparse
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from diptych.codecs.audio import decode_audio
from diptych.codecs.text import Conditioning, TextEncoder, negative_or_default
from diptych.codecs.tiles import TilePlan, decode_peak, plan_tiles, released_cost
from diptych.codecs.video import decode_cost, decode_video, lend_decoder
from diptych.engine.sharing import sharing_for
from diptych.errors import ClipError, RequestError
from diptych.media.clip import Clip
from diptych.memory.footprint import GIB, Parts, Phase, Setting, Size, footprint
from diptych.model import components
from diptych.model.checkpoint import Checkpoint
from diptych.model.config import TransformerConfig
from diptych.model.keys import current_name, stays_as_stored
from diptych.model.loading import load_into
from diptych.model.transformer import Transformer
from diptych.parallel import Layout
from diptych.parallel.deal import Deal
from diptych.planner.options import pick_bytes
from diptych.planner.task import parts_of
from diptych.request import ClipRequest, ResolvedRequest
from diptych.sampling.denoise import denoise
from diptych.sampling.denoiser import Denoiser
from diptych.sampling.latents import Latents, draw_noise
from diptych.sampling.schedules import schedule_for

CONTEXT = GIB // 2
"""What CUDA itself takes of a card."""

parser = argparse.ArgumentParser()
parser.add_argument("checkpoint")
parser.add_argument("--prompt", default="A brass kettle begins to sing on a wood stove")
parser.add_argument("--size", default="432x256")
parser.add_argument("--frames", type=int, default=25)
parser.add_argument("--steps", type=int)
parser.add_argument("--seed", type=int, default=7)
parser.add_argument("--dtype", choices=("float16", "float32"), default="float16")
parser.add_argument("--cap", default="15GiB", help="what a stage may take of each card; torch is held to it")
parser.add_argument("--output", default="kettle.mp4")


def main(arguments: list[str] | None = None) -> Clip | None:
    options = parser.parse_args(arguments)
    rank, layout = dist.get_rank(), Layout(ulysses=dist.get_world_size())
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    width, height = map(int, options.size.split("x"))
    given = {"width": width, "height": height, "frames": options.frames, "steps": options.steps}
    checkpoint = Checkpoint.open(options.checkpoint)
    request = ClipRequest(options.prompt, seed=options.seed, **given).resolve(checkpoint.defaults)
    dtype = getattr(torch, options.dtype)
    cap = pick_bytes("--cap", options.cap)
    assert cap is not None
    predicted = stages(checkpoint, request, layout, cap - CONTEXT)
    if rank == 0:
        print(table(predicted, cap), flush=True)
    check(predicted, cap)
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap / torch.cuda.mem_get_info(device)[1]), device)

    texts = [options.prompt] + [negative_or_default(None)] * request.guided
    box = [None]
    if rank == 0:
        with stage("text", device):
            box = [[lane.to("cpu") for lane in encode(checkpoint, texts, dtype, device)]]
    dist.broadcast_object_list(box, src=0)
    with stage("denoise", device):
        latents = sample(checkpoint, request, box[0], layout, dtype, device)
    with stage("picture", device):
        frames = picture(checkpoint, request, latents, cap - CONTEXT, device)
    if rank:
        return None
    with stage("sound", device):
        sound = make_sound(checkpoint, request, latents, device)
    clip = Clip(frames[0], None if sound is None else sound[0], request.fps)
    clip.check(request)
    clip.save(options.output)
    return clip


# -- what it will take -------------------------------------------------------------------------------------------------


def stages(checkpoint: Checkpoint, request: ResolvedRequest, layout: Layout, budget: int) -> dict[str, Phase]:
    """Bytes of each stage on the first card; the second one has no more in any."""
    size = Size(
        T=request.T, Y=request.Y, X=request.X, A=request.A, L=1024, lanes=1 + request.guided, steps=request.steps
    )
    return count(checkpoint.transformer, parts_of(checkpoint), size, layout, budget)


def count(config: TransformerConfig, parts: Parts, size: Size, layout: Layout, budget: int) -> dict[str, Phase]:
    setting = Setting(offload="model", fused=False, ulysses=layout.ulysses, modulation_itemsize=4)
    vae = 2 * parts.vae  # float32, which is counted with what decoding takes
    decode = decode_peak(size.T, size.Y, size.X, budget - vae, released_cost(itemsize=4)) + vae
    around = replace(parts, vae=0, clip=0)  # CLIP stays on the host
    phases = footprint(config, size, setting, decode=decode, parts=around).phases
    return {name: phases[name] for name in ("text", "denoise", "picture", "sound")}


def table(predicted: dict[str, Phase], cap: int) -> str:
    rows = [f"{'stage':10}{'weights':>10}{'work':>8}{'peak':>8}   GiB on each card, of {(cap - CONTEXT) / GIB:.1f}"]
    for name, phase in predicted.items():
        rows.append(f"{name:10}{phase.weights / GIB:10.2f}{phase.work / GIB:8.2f}{phase.peak / GIB:8.2f}")
    return "\n".join(rows)


def check(predicted: dict[str, Phase], cap: int) -> None:
    """Raises `RequestError` for a card on which a stage does not fit."""
    name = max(predicted, key=lambda name: predicted[name].peak)
    needed = predicted[name].peak + CONTEXT
    if needed > cap:
        raise RequestError("--cap", f"{cap / GIB:.2f} GiB", f"the stage {name} takes {needed / GIB:.2f} GiB")


@contextmanager
def stage(name: str, device: torch.device) -> Iterator[None]:
    """One stage; afterwards all that it had is free, and on a GPU its peak is told."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield
    gc.collect()
    if device.type == "cuda":
        print(f"{name:10}peak {torch.cuda.max_memory_allocated(device) / GIB:5.2f} GiB on {device}", flush=True)
        torch.cuda.empty_cache()


# -- the stages --------------------------------------------------------------------------------------------------------


def encode(checkpoint: Checkpoint, texts: list[str], dtype: torch.dtype, device: torch.device) -> list[Conditioning]:
    """The language model takes a whole card; CLIP, which reads 77 tokens once, stays on the host."""
    language = components.load_text_encoder(checkpoint, device, dtype)
    clip = components.load_clip(checkpoint, "cpu", torch.float32)
    tokenizers = components.load_tokenizer(checkpoint), components.load_clip_tokenizer(checkpoint)
    encoder = TextEncoder(tokenizers[0], language, tokenizers[1], clip)
    lanes = [encoder.encode([text]) for text in texts]
    if not all(bool(lane.text_BLD.isfinite().all()) for lane in lanes):
        raise ClipError("the text features are not finite in float16; take another prompt, or a card with bfloat16.")
    return lanes


def sample(
    checkpoint: Checkpoint,
    request: ResolvedRequest,
    lanes: list[Conditioning],
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
) -> Latents:
    """Each card has all weights and half of the video tokens. No weight stays in bfloat16, whatever the files hold."""
    with torch.device("meta"):
        model = Transformer(checkpoint.transformer)
    load_into(
        model,
        checkpoint["transformer"],
        device=device,
        dtypes=lambda name, _: torch.float32 if stays_as_stored(name) else dtype,
        rename=current_name,
    )
    config = checkpoint.transformer
    noise = draw_noise(
        [request], [torch.Generator().manual_seed(request.request.seed)], config.in_visual_dim, config.in_audio_dim
    )
    schedule = schedule_for(checkpoint.scheduler, request.steps, request.request.sigma_grid)
    sharing = sharing_for(layout, device)
    with torch.no_grad():
        grid = model.grid(request.T, request.Y, request.X, request.A, tail=False, device=device)
        attend, shard = sharing.split(grid.tokens)
        contexts = [model.context(lane.text_BLD.to(device), lane.pooled_BD.to(device), None) for lane in lanes]
        denoiser = Denoiser(model, attend, grid, contexts, request.guidance, None, shard, sharing.combine)
        return denoise(denoiser.velocity, schedule, noise.to(device))


def picture(
    checkpoint: Checkpoint, request: ResolvedRequest, latents: Latents, budget: int, device: torch.device
) -> object:
    """Frames on the first rank; both decode tiles, in float32."""
    vae = components.load_vae(checkpoint, device, torch.float32)
    weights = sum(parameter.nbytes for parameter in vae.parameters())
    plan: TilePlan = plan_tiles(request.T, request.Y, request.X, budget - weights, decode_cost(vae))
    deal = Deal.to_all_ranks()
    video_BCTYX = deal.same(latents.video).permute(0, 4, 1, 2, 3)
    if deal.first:
        return decode_video(vae, video_BCTYX, plan, deal=deal)
    return lend_decoder(vae, video_BCTYX, plan, deal)


def make_sound(checkpoint: Checkpoint, request: ResolvedRequest, latents: Latents, device: torch.device) -> object:
    if latents.audio is None:
        return None
    audio_vae = components.load_audio_vae(checkpoint, device, torch.float32)
    vocoder = components.load_vocoder(checkpoint, device, torch.float32)
    return decode_audio(audio_vae, vocoder, latents.audio.permute(0, 2, 1), request.samples)


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group()
    main()
    dist.destroy_process_group()
