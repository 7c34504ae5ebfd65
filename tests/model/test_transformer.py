"""The transformer against stock diffusers: one velocity, same weights, float32."""

from __future__ import annotations

import pytest
import torch
from diffusers import Kandinsky6Transformer3DModel

from diptych.attention import LocalAttend, Role, exponents, kernels
from diptych.model import layers
from diptych.model.config import TINY, TransformerConfig
from diptych.model.transformer import Modulations, Transformer
from few_keys import FewKeys

pytestmark = pytest.mark.filterwarnings("ignore")


def stock(config: TransformerConfig) -> Kandinsky6Transformer3DModel:
    """Stock transformer whose gates and modulations are far from zero, so that every path matters."""
    torch.manual_seed(0)
    model = Kandinsky6Transformer3DModel(**config.to_dict()).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        scale = 0.4 if "modulation" in name else 1.0 / parameter.shape[-1] ** 0.5
        noise = torch.randn(parameter.shape, generator=generator) * scale
        parameter.data = noise + 1.0 if name.endswith("norm.weight") else noise
    return model


def ours(reference: Kandinsky6Transformer3DModel, config: TransformerConfig) -> Transformer:
    with torch.device("meta"):
        model = Transformer(config)
    model.load_state_dict(reference.state_dict(), strict=True, assign=True)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module", params=[TINY, TINY.distilled()], ids=["base", "distilled"])
def pair(request):
    reference = stock(request.param)
    return reference, ours(reference, request.param)


CASES = {
    "sound": {},
    "image": {"tail": True},
    "video-only": {"A": 0},
    "image, video-only": {"tail": True, "A": 0},
    "two prompts of unequal length": {"B": 2, "mask": True},
    "odd grid": {"T": 3, "Y": 6, "X": 10, "A": 7},
    "one frame": {"T": 1, "A": 2},
}


class Watching(LocalAttend):
    """Remembers which bounds it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.bounds: list[float | None] = []

    def __call__(self, role, *tensors, bound=None):
        self.bounds.append(bound)
        return super().__call__(role, *tensors, bound=bound)


@pytest.mark.parametrize("bounded", [False, True, "few"], ids=["kernels scale", "queries carry the scale", "few keys"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_one_velocity_equals_diffusers(pair, case, bounded, monkeypatch):
    """Where a kernel asks for scores with a bound, every attention multiplies its queries beforehand, and says it.

    "few keys": a kernel that finishes queries itself takes what is without a mask and has keys of another sequence.
    """
    reference, model = pair
    monkeypatch.setattr(layers, "bounds_pay", lambda *_: bool(bounded))
    few = FewKeys()
    if bounded == "few":
        monkeypatch.setattr(kernels, "KERNELS", few.kernels)
    B, T, Y, X, A, L, tail, mask = (
        {"B": 1, "T": 2, "Y": 4, "X": 6, "A": 5, "L": 9, "tail": False, "mask": False} | case
    ).values()
    draw = torch.Generator().manual_seed(2)
    c = model.config
    video = torch.randn(B, T + tail, Y, X, c.visual_in, generator=draw)
    audio = torch.randn(B, A, c.in_audio_dim, generator=draw) if A else None
    text = torch.randn(B, L, c.in_text_dim, generator=draw)
    pooled = torch.randn(B, c.in_text_dim2, generator=draw)
    t = torch.full((B,), 617.3)
    key_mask = torch.arange(L) < torch.tensor([[L], [L - 4]]) if mask else None
    positions = types = None
    if tail:
        positions = (torch.tensor([*range(T), 0]), torch.arange(Y // 2), torch.arange(X // 2))
        types = torch.tensor([[0] * T + [1]] * B)

    expected = reference(video, text, pooled, t, audio, positions, key_mask, types, return_dict=False)
    context = model.context(text, pooled, key_mask)
    grid = model.grid(T, Y, X, A, tail=tail, device=video.device)
    attend = Watching()
    got = model(video, audio, t, context, grid, attend)

    assert {type(bound) for bound in attend.bounds} == {float if bounded else type(None)}
    assert all(0 < bound < exponents.MOST for bound in attend.bounds if bounded)
    blocks = c.num_visual_blocks
    unfinished = [q.weight_K is not None for q in few.seen]
    assert unfinished.count(True) == (0 if bounded != "few" or mask else (2 if A else 1) * blocks), "to the text"
    assert unfinished.count(False) == (2 * blocks if bounded == "few" and A else 0), "rotated, to each other"
    assert expected[0].abs().max() > 1, "the reference must say something"
    torch.testing.assert_close(got[0], expected[0], atol=1e-5, rtol=0)
    if A:
        torch.testing.assert_close(got[1], expected[1], atol=1e-5, rtol=0)
    else:
        assert got[1] is None


def test_half_precision_timesteps_are_refused(pair):
    _, model = pair
    context = model.context(
        torch.randn(1, 3, model.config.in_text_dim), torch.randn(1, model.config.in_text_dim2), None
    )
    with pytest.raises(AssertionError, match="timestep"):
        model.modulations(torch.tensor([500.0], dtype=torch.bfloat16), context, audio=True)


def test_time_and_modulation_stay_float32_in_a_half_precision_model(pair):
    """Working dtype bf16: everything that time decides equals the float32 model's bit for bit."""
    reference, model = pair
    half = ours(reference, model.config)
    keep = ("embeddings", "modulation")
    for name, parameter in half.named_parameters():
        if not any(part in name for part in keep):
            parameter.data = parameter.data.to(torch.bfloat16)
    assert half.dtype is torch.bfloat16
    text, pooled = torch.randn(1, 6, model.config.in_text_dim), torch.randn(1, model.config.in_text_dim2)
    t = torch.tensor([991.6046])
    full_context, half_context = model.context(text, pooled, None), half.context(text, pooled, None)
    want = model.modulations(t, full_context, audio=True)
    have = half.modulations(t, half_context, audio=True)
    for a, b in zip(flat(want), flat(have), strict=True):
        assert b.dtype is torch.float32
        assert torch.equal(a, b)
    for side in ("pooled_video", "pooled_audio"):
        assert torch.equal(getattr(full_context, side), getattr(half_context, side))
    assert half_context.text_video.dtype is torch.bfloat16


def flat(m: Modulations) -> list[torch.Tensor]:
    blocks = [tensor for block in m.blocks for tensor in block]
    return [*m.text_video, *m.text_audio, *blocks, m.head_video, m.head_audio]


def test_phases_compose(pair):
    """Running the blocks in two parts is the same as in one, bit for bit: the seam for stages and offload."""
    _, model = pair
    c = model.config
    video, audio = torch.randn(1, 2, 4, 4, c.visual_in), torch.randn(1, 3, c.in_audio_dim)
    context = model.context(torch.randn(1, 5, c.in_text_dim), torch.randn(1, c.in_text_dim2), None)
    grid = model.grid(2, 4, 4, 3, tail=False, device=video.device)
    attend, t = LocalAttend(), torch.tensor([400.0])
    streams = model.embed(video, audio, context, grid, model.modulations(t, context, audio=True), attend)
    parts = model.blocks(model.blocks(streams, attend, 0, 1), attend, 1)
    video_out, audio_out = model.head(parts)
    whole = model(video, audio, t, context, grid, attend)
    assert torch.equal(model.unpatchify(video_out, grid), whole[0])
    assert torch.equal(audio_out, whole[1])


def test_the_bound_of_an_attention_is_that_of_its_weights_as_they_are(monkeypatch):
    attention = layers.Attention(Role.TEXT_SELF, 32, 16).requires_grad_(False)
    asked = []
    compute = exponents.bound
    monkeypatch.setattr(exponents, "bound", lambda *weights: asked.append(0) or compute(*weights))
    first = attention.bound()
    assert attention.bound() == first
    assert len(asked) == 1
    attention.query_norm.weight.mul_(3)
    assert attention.bound() == pytest.approx(3 * first)
    attention.key_norm.weight = torch.nn.Parameter(torch.full((16,), 2.0))
    assert attention.bound() == pytest.approx(6 * first)
    assert len(asked) == 3


def test_a_bound_belongs_to_weights_and_not_to_where_they_lie_in_memory():
    attention = layers.Attention(Role.TEXT_SELF, 32, 16)
    first = attention.bound()
    for factor in range(2, 10):
        other = torch.full((16,), float(factor))
        attention.query_norm.weight = None  # what is made next gets its place, and its id
        attention.query_norm.weight = torch.nn.Parameter(other)
        assert attention.bound() == pytest.approx(factor * first)


@pytest.mark.parametrize("trained", ["what comes in", "to_value.weight", "nothing"])
def test_no_bound_is_said_where_a_gradient_is_wanted(trained, monkeypatch):
    """The kernels that ask for one have none, as all that is fused."""
    monkeypatch.setattr(layers, "bounds_pay", lambda *_: True)
    attention, attend = layers.Attention(Role.TEXT_SELF, 32, 16).requires_grad_(False), Watching()
    x = torch.randn(1, 3, 32, requires_grad=trained == "what comes in")
    if trained.startswith("to_value"):
        attention.get_parameter(trained).requires_grad_()
    with torch.no_grad():
        scaled = attention(attend, x)
    plain = attention(attend, x)
    assert [bound is None for bound in attend.bounds] == [False, trained != "nothing"]
    torch.testing.assert_close(plain, scaled, atol=1e-6, rtol=0)


def test_weights_made_in_inference_mode_have_a_bound_too():
    with torch.inference_mode():
        attention = layers.Attention(Role.TEXT_SELF, 32, 16)
        assert attention.bound() == attention.bound() > 0
