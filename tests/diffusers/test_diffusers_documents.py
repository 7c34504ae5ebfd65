"""docs/diffusers.md: its scripts run as they stand, and their result does not depend on the number of ranks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from document_work import EXAMPLES, run_script, write_tiny_pipeline
from PIL import Image

from diptych.diffusers import MODELS
from diptych.diffusers.backends import KERNEL_OF
from diptych.media.mp4 import read_clip

PAGE = (EXAMPLES.parent / "diffusers.md").read_text()
ARGUMENTS = {
    "diffusers_kandinsky6": ["--size", "80x48", "--frames", "5", "--steps", "1", "--guidance", "2"],
    "diffusers_flux": ["--size", "40x24", "--steps", "1", "--text", "16"],
    "diffusers_hunyuan_video": ["--size", "48x32", "--frames", "5", "--steps", "1"],
}


def picture(path: Path) -> np.ndarray:
    if path.suffix == ".png":
        return np.asarray(Image.open(path)).astype(float)
    return read_clip(path).frames.astype(float)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_script_makes_one_picture_on_any_number_of_ranks(ranks, tiny_base: Path, tmp_path: Path, name: str) -> None:
    short = name.removeprefix("diffusers_")
    checkpoint = tiny_base if short == "kandinsky6" else write_tiny_pipeline(short, tmp_path / "checkpoint")
    results = []
    for world in (2, 3):
        output = tmp_path / f"{world}.{'png' if short == 'flux' else 'mp4'}"
        layout = ["--layout", f"ring={world}"] if short == "hunyuan_video" else []
        arguments = [str(checkpoint), *ARGUMENTS[name], *layout, "--output", str(output)]
        ranks(world)(run_script, name, arguments)
        results.append(picture(output))
    assert results[0].shape == results[1].shape
    assert results[0].std() > 1, "a flat picture shows nothing"
    assert np.abs(results[0] - results[1]).max() <= 1


def test_the_page_names_what_exists() -> None:
    for script in re.findall(r"\(examples/(\w+)\.py\)", PAGE):
        assert (EXAMPLES / f"{script}.py").exists()
    for cls in MODELS:
        assert f"`{cls.__name__}`" in PAGE
    for backend, kernel in KERNEL_OF.items():
        assert re.search(rf"^\| `{backend}`.* \| `{kernel}` ", PAGE, re.MULTILINE), backend
