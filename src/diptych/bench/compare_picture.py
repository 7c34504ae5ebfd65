"""How far two films differ, frame by frame."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Frames = npt.NDArray[np.uint8]
Array = npt.NDArray[np.float64]

WINDOW, SIGMA = 11, 1.5
LUMA = (0.299, 0.587, 0.114)


def psnr(a: Frames, b: Frames) -> Array:
    """Peak signal-to-noise ratio of each frame over all colours, dB; infinite for equal frames."""
    errors = np.asarray([((x.astype(np.float64) - y) ** 2).mean() for x, y in zip(a, b, strict=True)])
    with np.errstate(divide="ignore"):
        ratios: Array = 10 * np.log10(255**2 / errors)
    return ratios


def ssim(a: Frames, b: Frames) -> Array:
    """Structural similarity of each frame's luma, mean over the frame.

    Wang et al. 2004: Gaussian window of 11 pixels with sigma 1.5, K1 = 0.01, K2 = 0.03, no padding; frames narrower
    than the window get one of their width.
    """
    weights = torch.tensor(LUMA, dtype=torch.float64)
    size = min(WINDOW, *a.shape[1:3])
    at = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    line = torch.exp(-(at**2) / (2 * SIGMA**2))
    line = line / line.sum()

    def blurred(x_HW: Tensor) -> Tensor:
        rows = torch.nn.functional.conv2d(x_HW[None, None], line.view(1, 1, -1, 1))
        return torch.nn.functional.conv2d(rows, line.view(1, 1, 1, -1))[0, 0]

    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    values = []
    for one, other in zip(a, b, strict=True):
        x, y = (torch.from_numpy(frame).double() @ weights for frame in (one, other))
        mean_x, mean_y = blurred(x), blurred(y)
        var_x, var_y = blurred(x * x) - mean_x**2, blurred(y * y) - mean_y**2
        covariance = blurred(x * y) - mean_x * mean_y
        similarity = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
        similarity = similarity / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
        values.append(similarity.mean().item())
    return np.asarray(values)


def temporal_difference(a: Frames, b: Frames) -> float:
    """Mean absolute difference of the changes from frame to frame, of 255: what flickers in only one of them."""
    if len(a) < 2:
        return 0.0
    strays = [
        np.abs(np.diff(a[n : n + 2].astype(np.int16), axis=0) - np.diff(b[n : n + 2].astype(np.int16), axis=0)).mean()
        for n in range(len(a) - 1)
    ]
    return float(np.mean(strays))
