"""Offload in an engine: the same clip in every mode, each model on the device only in its stage, clear sentences."""

from __future__ import annotations

import json
from datetime import timedelta

import numpy as np
import offload_work as work
import pytest
import torch
from PIL import Image

from diptych.codecs import video
from diptych.engine.engine import Engine
from diptych.engine.options import Options
from diptych.engine.order import take_batch
from diptych.engine.placement import STAGES, loading
from diptych.errors import Cancelled, DeviceMemoryError, RequestError
from diptych.memory.footprint import SOUND_WORK
from diptych.model.checkpoint import Checkpoint
from diptych.parallel import Layout
from diptych.request import ClipRequest

SMALL = {"width": 48, "height": 32, "frames": 9, "steps": 3, "seed": 7}
RED = ClipRequest("a red circle", **SMALL)


def clip(folder, request=RED, **options):
    with Engine.load(folder, device="cpu", **options) as engine:
        return engine.generate(request)


def equal(one, other):
    return np.array_equal(one.frames, other.frames) and np.array_equal(one.audio, other.audio)


@pytest.fixture(scope="module")
def plain(tiny_base):
    return clip(tiny_base)


@pytest.mark.parametrize(
    "options",
    [{"offload": "model"}, {"offload": "model", "modulation": "tables"}, {"offload": "block"}, {"memory": "4GiB"}],
    ids=lambda options: " ".join(options.values()),
)
def test_the_same_clip(tiny_base, plain, options):
    made = clip(tiny_base, **options)
    assert equal(made, plain)
    told = made.report["memory"]
    assert made.report["offload"] == told["offload"] == options.get("offload", "none")
    assert set(told["predicted"]) == {"text", "denoise", "picture", "sound"}
    json.dumps(made.report)


@pytest.mark.parametrize(
    ("request_changes", "options"),
    [
        ({"image": Image.new("RGB", (48, 32), "red")}, {}),
        ({"audio": False}, {}),
        ({"guidance": 1.0}, {}),
        ({}, {"precision": "fp8"}),
        ({}, {"precision": "fp8:first=1"}),
        ({"steps": 6}, {"cache": "firstblock:0.5,3,0.2"}),
    ],
    ids=["image", "silent", "no guidance", "fp8", "fp8 but for a block", "cache"],
)
def test_the_same_clip_with_blocks_streamed(tiny_base, request_changes, options):
    request = ClipRequest("a red circle", **(SMALL | request_changes))
    want, got = (clip(tiny_base, request, offload=mode, **options) for mode in ("none", "block"))
    assert np.array_equal(want.frames, got.frames)
    assert want.audio is None or np.array_equal(want.audio, got.audio)
    assert want.report["forwards"] == got.report["forwards"]


def test_a_distilled_checkpoint(tiny_distilled):
    assert equal(clip(tiny_distilled), clip(tiny_distilled, offload="block"))


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["ulysses=2", "cfg=2", "tensor=2"])
def test_every_rank_streams_its_own(tiny_base, ranks, layout):
    """The pool's ranks: the same bits as without offload, on the same layout."""
    of_ranks = ranks(2)(work.clips, str(tiny_base), layout, ["none", "block", "model"], RED)
    (want, _), *others = of_ranks[0]
    for got, _ in others:
        assert np.array_equal(got[0], want[0]) and np.array_equal(got[1], want[1])
    assert all(fetched > 0 for rank in of_ranks for _, fetched in rank[1:])


@pytest.mark.parametrize("offload", ["model", "block"])
def test_each_model_is_on_the_device_in_its_stage_only(tiny_base, offload):
    seen: dict[str, set[str]] = {}
    with Engine.load(tiny_base, device="cpu", offload=offload) as engine:
        placement = engine._executor._runner.components.placement
        guests = placement.visiting
        assert set(guests) == {"language", "clip", "transformer", "vae", "sound"}

        def look(progress):
            there = {name for name, guest in guests.items() if guest.device_bytes}
            seen.setdefault(progress.stage, set()).update(there)
            if progress.stage == "denoise" and progress.done < progress.total and offload == "block":
                assert len(guests["transformer"].on_device) <= 2

        engine.generate(RED, on_step=look)
        assert not any(guest.device_bytes for guest in guests.values())
    assert seen["text"] == set(STAGES["text"])
    # The decoders are brought in ahead, beside the last step.
    assert seen["denoise"] == {"transformer", "vae", "sound"}
    assert seen["decode"] == {"vae", "sound"}


def test_the_sound_has_left_the_device_before_the_first_tile_needs_room(tiny_base, monkeypatch):
    held, plain = [], video.decode_tile
    with Engine.load(tiny_base, device="cpu", offload="model") as engine:
        sound = engine._executor._runner.components.placement.visiting["sound"]
        monkeypatch.setattr(video, "decode_tile", lambda *given: (held.append(sound.device_bytes), plain(*given))[1])
        engine.generate(RED)
    assert held == [0]


def test_what_was_brought_in_ahead_for_a_stopped_clip_is_gone_before_the_next(tiny_base, plain):
    with Engine.load(tiny_base, device="cpu", offload="model") as engine:
        guests = engine._executor._runner.components.placement.visiting

        def stop(progress):
            if progress.stage == "denoise" and progress.done == 3:
                raise Cancelled("enough")

        with pytest.raises(Cancelled):
            engine.generate(RED, on_step=stop)
        assert guests["vae"].device_bytes

        def look(progress):
            if progress.stage == "text":
                assert not guests["vae"].device_bytes and not guests["transformer"].device_bytes

        assert equal(engine.generate(RED, on_step=look), plain)


def test_a_budget_is_asked_again_for_every_clip(tiny_base):
    with Engine.load(tiny_base, device="cpu", offload="none", memory="1GiB") as engine:
        assert engine.generate(RED).report["memory"]["budget"] == 1 << 30
        large = ClipRequest("a red circle", **(SMALL | {"width": 2048, "height": 2048, "frames": 121}))
        with pytest.raises(RequestError, match=r"memory = '1GiB' is not accepted: 2048x2048 in 121 frames takes at"):
            engine.generate(large)
        assert engine.generate(RED) is not None


def test_a_budget_that_only_a_small_clip_fits_takes_blocks(tiny_base):
    with Engine.load(tiny_base, device="cpu", memory="300MiB") as engine:
        with pytest.raises(RequestError, match=r"memory = '300MiB' is not accepted: 48x32 in 9 frames takes at least"):
            engine.generate(RED)
        assert engine._executor._runner.components.options.offload == "block"


def test_a_budget_tiles_the_picture(tiny_base):
    def tiles(**options):
        with Engine.load(tiny_base, device="cpu", **options) as engine:
            runner = engine._executor._runner
            orders = take_batch([ClipRequest("a", width=512, height=512, frames=17)], engine.defaults)
            runner.components.placement.prepare(orders[0].resolved, 1, tail=False)
            return len(runner._tiles(orders[0].resolved).tiles)

    assert tiles() == tiles(memory="3GiB") < tiles(memory="700MiB") == tiles(memory="700MiB", offload="block")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"offload": "all"}, "offload = 'all' is not accepted: none, model or block."),
        (
            {"memory": "much"},
            "memory = 'much' is not accepted: a size such as 6GiB or 512MiB, from 1 byte to 1 million TiB.",
        ),
        ({"offload": "block", "memory": -1}, "memory = -1 is not accepted"),
    ],
)
def test_what_is_no_mode_or_size_is_refused(tiny_base, options, words):
    with pytest.raises(RequestError, match="is not accepted") as error:
        Engine.load(tiny_base, device="cpu", **options)
    assert words in str(error.value)


BY_TORCH = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
BY_FA3 = RuntimeError(
    'torch_call_dispatcher( "aten::new_empty", "", stack.data(), TORCH_ABI_VERSION) API call failed at '
    "torch/csrc/stable/ops.h, line 933"
)
"""What FlashAttention-3 (fa3-fwd 0.0.3) raised on a GPU whose memory was spent."""


@pytest.mark.parametrize("raised", [BY_TORCH, BY_FA3], ids=["torch", "FlashAttention-3"])
def test_out_of_memory_says_what_was_predicted_and_what_would_fit(tiny_base, plain, raised):
    with Engine.load(tiny_base, device="cpu") as engine:
        transformer = engine._executor._runner.components.transformer

        def fail(module, args):
            raise raised

        hook = transformer.fused_blocks[1].register_forward_pre_hook(fail)
        with pytest.raises(DeviceMemoryError) as error:
            engine.generate(RED)
        told = str(error.value)
        assert told.startswith("cpu ran out of memory in stage denoise: ") and "MiB were predicted" in told
        assert "--offload model --memory " in told and told.endswith(" would fit.") and "\n" not in told
        hook.remove()
        assert equal(engine.generate(RED), plain), "the engine lives on"


def test_another_failure_stays_what_it_is(tiny_base):
    with Engine.load(tiny_base, device="cpu") as engine:

        def fail(module, args):
            raise RuntimeError("a fault of ours")

        engine._executor._runner.components.transformer.fused_blocks[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="a fault of ours"):
            engine.generate(RED)


def test_what_it_names_as_fitting_fits(tiny_base):
    assert SOUND_WORK < 600 << 20
    with Engine.load(tiny_base, device="cpu") as engine:
        placement = engine._executor._runner.components.placement
        engine.generate(RED)
        words = placement._advice().split()
    options = {"offload": words[1], "memory": words[3]}
    assert clip(tiny_base, **options).report["memory"]["offload"] == words[1]


def test_weights_that_find_no_room_say_so(tiny_base):
    checkpoint = Checkpoint.open(tiny_base)
    options = Options(checkpoint, Layout(), torch.device("cpu"), torch.float32, timedelta(seconds=9))
    with pytest.raises(DeviceMemoryError) as error, loading(options, torch.device("cuda", 1)):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    weights = sum(part.parameters for part in checkpoint.components.values()) * 4 / (1 << 20)
    told = str(error.value)
    assert told.startswith("cuda:1 ran out of memory while weights were loaded: ") and "--offload model keeps" in told
    assert float(told.split("loaded: ")[1].split(" MiB")[0]) == pytest.approx(weights, rel=0.2)
