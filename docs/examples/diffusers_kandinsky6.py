"""Kandinsky 6 in a diffusers script, on all GPUs of a machine (without GPUs: on CPU processes):

torchrun --nproc-per-node 2 docs/examples/diffusers_kandinsky6.py kandinskylab/Kandinsky-6.0-Lite-distill-5s-Diffusers
"""

import argparse
import os

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, Kandinsky6TI2VAPipeline

import diptych.diffusers  # noqa: F401 - makes enable_parallelism work for Kandinsky 6
from diptych.media.clip import Clip
from diptych.media.mp4 import write

parser = argparse.ArgumentParser()
parser.add_argument("checkpoint")
parser.add_argument("--prompt", default="A brass kettle begins to sing on a wood stove")
parser.add_argument("--size", default="864x480")
parser.add_argument("--frames", type=int, default=121)
parser.add_argument("--steps", type=int, default=16)
parser.add_argument("--guidance", type=float, default=1.0)
parser.add_argument("--output", default="kettle.mp4")


def main(arguments: list[str] | None = None) -> None:
    options = parser.parse_args(arguments)
    width, height = map(int, options.size.split("x"))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pipe = Kandinsky6TI2VAPipeline.from_pretrained(options.checkpoint, torch_dtype=dtype).to(device)
    pipe.transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=dist.get_world_size()))
    if device.type == "cuda":
        pipe.transformer.compile_repeated_blocks(fullgraph=True)

    frames, sound = pipe(
        options.prompt,
        width=width,
        height=height,
        num_frames=options.frames,
        num_inference_steps=options.steps,
        guidance_scale=options.guidance,
        generator=torch.Generator().manual_seed(7),  # the same noise on every rank
        output_type="np",
        return_dict=False,
    )
    if dist.get_rank() == 0:  # every rank has the clip
        pixels = (frames[0] * 255).round().astype("uint8")
        write(options.output, Clip(pixels, sound[0], fps=24.0, sample_rate=pipe.audio_sample_rate))


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    main()
    dist.destroy_process_group()
