"""Flux in a diffusers script, on all GPUs of a machine (without GPUs: on CPU processes):

torchrun --nproc-per-node 2 docs/examples/diffusers_flux.py black-forest-labs/FLUX.1-dev
"""

import argparse
import os

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, FluxPipeline

import diptych.diffusers  # noqa: F401 - keeps text on every rank, and takes any number of tokens and heads

parser = argparse.ArgumentParser()
parser.add_argument("checkpoint")
parser.add_argument("--prompt", default="A lighthouse at dusk, waves against the rocks")
parser.add_argument("--size", default="1024x1024")
parser.add_argument("--steps", type=int, default=28)
parser.add_argument("--text", type=int, default=512)
parser.add_argument("--output", default="lighthouse.png")


def main(arguments: list[str] | None = None) -> None:
    options = parser.parse_args(arguments)
    width, height = map(int, options.size.split("x"))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pipe = FluxPipeline.from_pretrained(options.checkpoint, torch_dtype=dtype).to(device)
    pipe.transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=dist.get_world_size()))
    if device.type == "cuda":
        pipe.transformer.compile_repeated_blocks(fullgraph=True)

    image = pipe(
        options.prompt,
        width=width,
        height=height,
        num_inference_steps=options.steps,
        guidance_scale=3.5,
        max_sequence_length=options.text,
        generator=torch.Generator().manual_seed(7),  # the same noise on every rank
    ).images[0]
    if dist.get_rank() == 0:  # every rank has the image
        image.save(options.output)


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    main()
    dist.destroy_process_group()
