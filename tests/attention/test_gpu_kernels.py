"""Every exact kernel that runs on this GPU: output, log-sum-exp, masks and grouped heads against float64."""

from __future__ import annotations

import pytest
import torch
from reference import assert_close, attention

from diptych.attention import KERNELS, LocalAttend, Role, unified_attention
from diptych.attention.kernels import need_of
from diptych.attention.place import Place
from diptych.attention.plan import Plan

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu

ON_GPU = [kernel for kernel in KERNELS if kernel.device in (None, "cuda") and kernel.exact]


def tensors(dtype: torch.dtype, kv_heads: int, head_dim: int, queries: int, keys: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (queries, 4), (keys, kv_heads), (keys, kv_heads)
    return [torch.randn(2, n, h, head_dim, device="cuda", generator=generator).to(dtype) for n, h in shapes]


def plain_float32(q, k, v, mask, expected) -> tuple[float, float]:
    """Three times what plain matrix products on the CPU are off by: it grows with the head size.

    Of the log-sum-exp two steps of float32 at least: few values can all be rounded well by luck, and the products and
    the sum of another kernel are rounded in another order.
    """
    host = [None if x is None else x.cpu() for x in (q, k, v, mask)]
    out, lse = LocalAttend("sdpa-math").with_lse(Role.VISUAL_SELF, *host)
    seen = torch.isfinite(expected[1])
    step = float(torch.finfo(torch.float32).eps * expected[1][seen].abs().max())
    lse_error = float((lse - expected[1])[seen].abs().max())
    return 3 * float((out - expected[0]).abs().max()), max(3 * lse_error, 2 * step)


@pytest.mark.parametrize("kernel", ON_GPU, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("queries", "keys"), [(130, 257), (1, 77), (225, 33)])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_reference(kernel, dtype, head_dim, queries, keys, kv_heads, masked) -> None:
    q, k, v = tensors(dtype, kv_heads, head_dim, queries, keys)
    mask = None
    if masked:
        mask = torch.rand(2, keys, device="cuda") > 0.5
        mask[0, : keys // 2] = False
        mask[1] = False
    if kernel.refusal(need_of(q, k, mask, True)) is not None:
        pytest.skip("says that it cannot")
    out, lse = kernel.with_lse(q, k, v, mask)
    expected = tuple(x.cpu() for x in attention(q, k, v, mask))
    limits = plain_float32(q, k, v, mask, expected) if dtype == torch.float32 else None
    assert_close(out.cpu(), lse.cpu(), expected, v, dtype, limits)
    alone = kernel(q, k, v, mask)
    assert torch.equal(alone, out)


@pytest.mark.parametrize("name", list(dict.fromkeys(kernel.name for kernel in ON_GPU)))
def test_compiles_whole(name: str) -> None:
    q, k, v = tensors(torch.bfloat16, 4, 64, 130, 130)

    def run(q, k, v):
        attended = unified_attention(q, k, v, Plan(Place(), (130,)), kernel=name, return_lse=True)
        return attended.out_BsHK, attended.lse_BsH

    out, lse = torch.compile(run, fullgraph=True)(q, k, v)
    assert_close(out.cpu(), lse.cpu(), tuple(x.cpu() for x in attention(q, k, v)), v, torch.bfloat16)


def test_strided_input_is_taken_as_it_is() -> None:
    """Heads and tokens often arrive as views: of a fused projection, of an exchange."""
    generator = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(2, 100, 3, 4, 64, device="cuda", generator=generator).bfloat16()
    q, k, v = qkv.unbind(2)
    for kernel in ON_GPU:
        out, lse = LocalAttend(kernel.name).with_lse(Role.VISUAL_SELF, q, k, v)
        assert_close(out.cpu(), lse.cpu(), tuple(x.cpu() for x in attention(q, k, v)), v, torch.bfloat16)


@pytest.mark.parametrize("kernel", [kernel for kernel in ON_GPU if kernel.name != "sdpa-math"], ids=lambda x: x.name)
def test_a_head_has_the_same_bits_however_many_are_computed(kernel) -> None:
    """What makes pure Ulysses exact: a rank computes fewer heads, each whole. At the size of a 5 second clip on Lite;
    with few tokens and heads some kernels split the keys, and then it depends on the number of heads."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, 51_840, 28, 64, device="cuda", generator=generator).bfloat16() for _ in range(3))
    whole = kernel(q, k, v)
    for start, stop in ((0, 14), (7, 14), (25, 28)):  # of 2, 4 and 8 ranks
        few = (x[:, :, start:stop].contiguous() for x in (q, k, v))
        assert torch.equal(kernel(*few), whole[:, :, start:stop])
