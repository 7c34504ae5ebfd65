"""HunyuanVideo in a diffusers script, on all GPUs of a machine (without GPUs: on CPU processes):

torchrun --nproc-per-node 2 docs/examples/diffusers_hunyuan_video.py hunyuanvideo-community/HunyuanVideo
"""

import argparse
import os

import torch
import torch.distributed as dist
from diffusers import HunyuanVideoPipeline

from diptych.diffusers import parallelize
from diptych.media.clip import Clip
from diptych.media.mp4 import write

parser = argparse.ArgumentParser()
parser.add_argument("checkpoint")
parser.add_argument("--layout", default="ulysses=2", help="ranks along each axis, such as ring=2,ulysses=4")
parser.add_argument("--prompt", default="A paper boat drifts down a rainy street")
parser.add_argument("--size", default="832x480")
parser.add_argument("--frames", type=int, default=61)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--output", default="boat.mp4")


def main(arguments: list[str] | None = None) -> None:
    options = parser.parse_args(arguments)
    width, height = map(int, options.size.split("x"))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pipe = HunyuanVideoPipeline.from_pretrained(options.checkpoint, torch_dtype=dtype).to(device)
    pipe.vae.enable_tiling()
    parallelize(pipe.transformer, options.layout)  # the same as enable_parallelism, without a config class
    if device.type == "cuda":
        pipe.transformer.compile_repeated_blocks(fullgraph=True)

    frames = pipe(
        options.prompt,
        width=width,
        height=height,
        num_frames=options.frames,
        num_inference_steps=options.steps,
        generator=torch.Generator().manual_seed(7),  # the same noise on every rank
        output_type="np",
    ).frames[0]
    if dist.get_rank() == 0:  # every rank has the clip
        write(options.output, Clip((frames * 255).round().astype("uint8"), None, fps=15.0))


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    main()
    dist.destroy_process_group()
