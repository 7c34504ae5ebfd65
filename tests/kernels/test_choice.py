"""Which kernel runs: by the lengths of an attention, and by where a tensor lives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diptych.attention import kernels
from diptych.attention.cores import fa3_splits
from diptych.model import ops

CPU = torch.device("cpu")


@pytest.fixture
def hopper(monkeypatch):
    """The order of the kernels on a Hopper GPU with FlashAttention-3, as if they ran here."""
    flash = next(kernel for kernel in kernels.KERNELS if kernel.device == "cpu")
    order = (
        replace(flash, name="fa3", mask=False, best_from=1024),
        replace(flash, name="sdpa-cudnn"),
        *kernels.KERNELS,
    )
    monkeypatch.setattr(kernels, "KERNELS", order)


def chosen(keys: int, masked: bool = False) -> str:
    need = kernels.Need(CPU, torch.bfloat16, 128, 51_840, keys, grouped=False, masked=masked, lse=False)
    return kernels.pick("auto", need).name


def test_long_keys_go_to_flash_attention_3_and_short_ones_to_cudnn(hopper):
    assert chosen(51_840) == "fa3"
    assert chosen(1024) == "fa3"
    assert chosen(200) == "sdpa-cudnn"
    assert chosen(51_840, masked=True) == "sdpa-cudnn"


def test_the_first_kernel_serves_where_none_is_at_its_best(monkeypatch):
    only = replace(next(kernel for kernel in kernels.KERNELS if kernel.device == "cpu"), name="fa3", best_from=1024)
    monkeypatch.setattr(kernels, "KERNELS", (only,))
    assert chosen(200) == "fa3"


def test_keys_are_split_when_queries_do_not_fill_the_gpu():
    assert fa3_splits((1, 51_840, 32, 128)) == 1
    assert fa3_splits((1, 6_480, 4, 128)) == 1  # an eighth of the heads and of the tokens still fill it
    assert fa3_splits((1, 225, 16, 128)) == 0


def test_fused_kernels_take_half_precision_on_a_gpu_and_nothing_else(monkeypatch):
    monkeypatch.setattr(ops, "runs_kernels", lambda device: True)
    half = torch.empty(2, 3, dtype=torch.bfloat16)
    assert not ops.fusible(half)
    with torch._subclasses.FakeTensorMode():
        on_gpu = torch.empty(2, 3, dtype=torch.bfloat16, device="cuda")
        assert ops.fusible(on_gpu)
        assert not ops.fusible(on_gpu.float())
        assert not ops.fusible(on_gpu[:0])
        assert not ops.fusible(on_gpu.requires_grad_())
        with torch.no_grad(), ops.plain_only():
            assert not ops.fusible(on_gpu)
        with torch.no_grad():
            assert ops.fusible(on_gpu)
            monkeypatch.setattr(ops, "runs_kernels", lambda device: False)
            assert not ops.fusible(on_gpu)
