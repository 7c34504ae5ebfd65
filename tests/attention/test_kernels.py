"""Kernels on one rank: right against float64, honest about what they cannot do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from reference import assert_close, attention

from diptych.attention import KERNELS, NO_KEY, LocalAttend, Need, Role, pick
from diptych.errors import KernelError

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
MASK = torch.tensor([[True, False, True, True, False, True, False], [False] * 7])


def tensors(
    dtype: torch.dtype, heads: int = 4, kv_heads: int = 4, queries: int = 5, keys: int = 7
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (queries, heads), (keys, kv_heads), (keys, kv_heads)
    return [torch.randn(2, tokens, h, 8, generator=generator).to(dtype) for tokens, h in shapes]


@pytest.mark.parametrize("name", ["sdpa-flash", "sdpa-math"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("mask", [None, MASK], ids=["all keys", "some keys, and none"])
def test_equals_the_reference(name: str, dtype: torch.dtype, kv_heads: int, mask: torch.Tensor | None) -> None:
    q, k, v = tensors(dtype, kv_heads=kv_heads)
    out, lse = LocalAttend(name).with_lse(Role.VISUAL_TEXT, q, k, v, mask)
    assert_close(out, lse, attention(q, k, v, mask), v, dtype)
    assert torch.equal(LocalAttend(name)(Role.VISUAL_TEXT, q, k, v, mask), out)


def test_a_query_without_a_key_gets_zeros() -> None:
    q, k, v = tensors(torch.float32)
    out, lse = LocalAttend().with_lse(Role.VISUAL_TEXT, q, k, v, MASK)
    assert not out[1].any()
    assert (lse[1] == NO_KEY).all()


@pytest.mark.parametrize("name", ["auto", "sdpa-flash", "sdpa-math"])
@pytest.mark.parametrize(
    "sizes",
    [{"queries": 0}, {"keys": 0}, {"queries": 0, "keys": 0}, {"heads": 0, "kv_heads": 0}],
    ids=["no queries", "no keys", "nothing", "no heads"],
)
def test_empty_input_is_legal(name: str, sizes: dict[str, int]) -> None:
    q, k, v = tensors(torch.float32, **sizes)
    out, lse = LocalAttend(name).with_lse(Role.VISUAL_SELF, q, k, v)
    assert out.shape == q.shape
    assert not out.any()
    assert (lse == NO_KEY).all()


def need(device: torch.device = CPU, dtype: torch.dtype = torch.bfloat16, **more) -> Need:
    values = {"head_dim": 64, "queries": 9, "keys": 9, "grouped": False, "masked": False, "lse": False}
    return Need(device, dtype, **(values | more))


@pytest.mark.parametrize(
    ("name", "asked", "sentence"),
    [
        ("sdpa-cudnn", need(), "runs on cuda, not on cpu; use sdpa-flash or sdpa-math."),
        ("sdpa-flash", need(CUDA, masked=True), "takes no key mask; use sdpa-cudnn, sdpa-efficient or sdpa-math."),
        (
            "sdpa-cudnn",
            need(CUDA, torch.float32),
            "takes bfloat16 and float16, not float32; use sdpa-efficient or sdpa-math.",
        ),
        ("sdpa-efficient", need(CUDA, torch.float32, grouped=True), "as many key heads as query heads; use sdpa-math."),
        ("sdpa-cudnn", need(CUDA, head_dim=256), "takes head sizes up to 128, not 256; use "),
        ("sdpa-flash", need(CUDA, head_dim=20), "a head size that is a multiple of 8, not 20; use sdpa-math."),
        ("sdpa-cudnn", need(CUDA, keys=1), "needs at least 2 queries and keys; use "),
    ],
)
def test_a_kernel_that_cannot_names_one_that_can(name: str, asked: Need, sentence: str) -> None:
    with pytest.raises(KernelError) as caught:
        pick(name, asked)
    assert str(caught.value).startswith(f"attention kernel {name} ")
    assert sentence in str(caught.value)


def test_an_unknown_kernel_is_refused_when_it_is_chosen() -> None:
    with pytest.raises(KernelError, match="attention kernel 'flash' does not exist; use auto, "):
        LocalAttend("flash")
    with pytest.raises(KernelError, match="does not exist"):
        LocalAttend({Role.VISUAL_SELF: "sage"})


@pytest.mark.skipif(any(kernel.name == "fa3" for kernel in KERNELS), reason="it is installed here")
def test_flash_attention_3_is_named_when_it_is_missing() -> None:
    with pytest.raises(KernelError, match="fa3 needs the package fa3-fwd, which is not installed"):
        LocalAttend("fa3")


def test_auto_prefers_the_faster() -> None:
    assert pick("auto", need()).name == "sdpa-flash"
    assert pick("auto", need(CUDA, torch.float32, masked=True)).name == "sdpa-efficient"
    assert pick("auto", need(CUDA, torch.float64)).name == "sdpa-math"


def test_a_card_before_ampere_takes_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4 has no bfloat16, and neither cuDNN's attention nor FlashAttention-2."""
    half = need(CUDA, torch.float16, keys=10_000)
    ampere = pick("auto", half).name
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=7, minor=5))
    assert (ampere, pick("auto", half).name) == ("sdpa-cudnn", "sdpa-efficient")
    with pytest.raises(KernelError, match="sdpa-flash is not available on this GPU; use sdpa-efficient or sdpa-math"):
        pick("sdpa-flash", half)


def test_a_role_can_have_its_own_kernel() -> None:
    attend = LocalAttend({Role.AUDIO_SELF: "sdpa-math"})
    q, k, v = tensors(torch.bfloat16)
    flash, math = LocalAttend("sdpa-flash"), LocalAttend("sdpa-math")
    assert torch.equal(attend(Role.AUDIO_SELF, q, k, v), math(Role.AUDIO_SELF, q, k, v))
    assert torch.equal(attend(Role.VISUAL_SELF, q, k, v), flash(Role.VISUAL_SELF, q, k, v))
    assert not torch.equal(math(Role.AUDIO_SELF, q, k, v), flash(Role.AUDIO_SELF, q, k, v))
