"""Each role on several ranks equals the role on one; only video self-attention and the merge send anything."""

from __future__ import annotations

import pytest
import torch
from parallel_work import AUDIO_HEADS, HEAD_DIM, attend_role, compiled_role, draw, role_tensors, shard_and_back

from diptych.attention import LocalAttend, Role, merge_bytes
from diptych.parallel import Layout

pytestmark = pytest.mark.distributed

LAYOUTS = [Layout(ulysses=2), Layout(ring=2), Layout(ring=3), Layout(ulysses=3), Layout(ring=2, ulysses=2)]
AUDIO = 6


@pytest.mark.parametrize("layout", [*LAYOUTS, Layout(cfg=2, ulysses=2)], ids=str)
@pytest.mark.parametrize("tokens", [12, 13, 1])
def test_tokens_are_scattered_and_gathered(ranks, layout: Layout, tokens: int) -> None:
    results = ranks(layout.world)(shard_and_back, layout, tokens)
    of_one_half = results[: layout.sequence]
    assert torch.equal(torch.cat([result["own"] for result in of_one_half], 1), draw(0, 2, tokens, 3))
    assert torch.equal(torch.cat([result["rope"] for result in of_one_half], 0), draw(1, tokens, 1, 4))
    for result in results:
        assert result["whole again"]
        assert max(result["lengths"]) - min(result["lengths"]) <= 1
        padded = 2 * max(result["lengths"]) * 3 * 4
        assert [(sent.collective, sent.bytes) for sent in result["sent"]] == [
            ("all_gather_into_tensor", (layout.sequence - 1) * padded)
        ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("role", list(Role), ids=str)
def test_a_role_equals_one_process(ranks, layout: Layout, role: Role) -> None:
    tokens, start = 13, 0
    q, k, v = role_tensors(role, tokens, AUDIO, torch.float32)
    expected = LocalAttend()(role, q[0], k[0], v[0])
    exact = role is not Role.AUDIO_FROM_VIDEO and (role is not Role.VISUAL_SELF or layout.ring == 1)
    for result in ranks(layout.world)(attend_role, layout, role, tokens, AUDIO, torch.float32):
        out = result["out"]
        part = expected[:, start : start + out.shape[1]] if q[1] else expected
        start += out.shape[1]
        if exact:
            assert torch.equal(out, part)
        assert float((out - part).abs().max()) <= 1e-6


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_only_two_roles_send(ranks, layout: Layout) -> None:
    for role in set(Role) - {Role.VISUAL_SELF, Role.AUDIO_FROM_VIDEO}:
        for result in ranks(layout.world)(attend_role, layout, role, 13, AUDIO, torch.float32):
            assert result["sent"] == []


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_merge_is_one_small_gather_and_equal_everywhere(ranks, layout: Layout, dtype: torch.dtype) -> None:
    results = ranks(layout.world)(attend_role, layout, Role.AUDIO_FROM_VIDEO, 13, AUDIO, dtype)
    expected_bytes = merge_bytes(
        layout.world, queries=AUDIO, heads=AUDIO_HEADS, head_dim=HEAD_DIM, itemsize=dtype.itemsize, batch=2
    )
    q, k, v = (x for x, _ in role_tensors(Role.AUDIO_FROM_VIDEO, 13, AUDIO, dtype))
    exact = LocalAttend("sdpa-math")(Role.AUDIO_FROM_VIDEO, q.double(), k.double(), v.double())
    for result in results:
        assert [(sent.collective, sent.bytes) for sent in result["sent"]] == [
            ("all_gather_into_tensor", expected_bytes)
        ]
        assert result["out"].dtype == dtype
        assert torch.equal(result["out"], results[0]["out"])
        limit = 1e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps / 2 * float(v.abs().max())
        assert float((result["out"].double() - exact).abs().max()) <= limit


def test_a_rank_without_tokens_has_no_say(ranks) -> None:
    """Two tokens on four ranks: two ranks bring nothing, and nothing is what they add."""
    layout = Layout(ring=2, ulysses=2)
    q, k, v = (x for x, _ in role_tensors(Role.AUDIO_FROM_VIDEO, 2, AUDIO, torch.float32))
    expected = LocalAttend()(Role.AUDIO_FROM_VIDEO, q, k, v)
    for result in ranks(4)(attend_role, layout, Role.AUDIO_FROM_VIDEO, 2, AUDIO, torch.float32):
        assert float((result["out"] - expected).abs().max()) <= 1e-6


@pytest.mark.parametrize("role", [Role.VISUAL_SELF, Role.AUDIO_FROM_VIDEO], ids=str)
def test_a_mask_over_video_is_whole_and_sliced_here(ranks, role: Role) -> None:
    """With the first shard's keys all hidden, on three ranks."""
    mask = torch.ones(2, 13, dtype=torch.bool)
    mask[:, :6] = False
    mask[1] = False
    q, k, v = role_tensors(role, 13, AUDIO, torch.float32)
    expected = LocalAttend()(role, q[0], k[0], v[0], mask)
    assert not expected[1].any()
    results = ranks(3)(attend_role, Layout(ring=3), role, 13, AUDIO, torch.float32, mask)
    out = torch.cat([result["out"] for result in results], 1) if q[1] else results[2]["out"]
    assert float((out - expected).abs().max()) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_merge_is_one_graph(ranks, dtype: torch.dtype) -> None:
    for result in ranks(2)(compiled_role, Layout(ulysses=2), Role.AUDIO_FROM_VIDEO, 13, AUDIO, dtype):
        graphs, breaks, error = result
        assert (graphs, breaks) == (1, 0)
        assert error <= (1e-6 if dtype == torch.float32 else 1e-2)
