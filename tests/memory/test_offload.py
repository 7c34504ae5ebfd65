"""Weights that wait in host memory: the same bits, never more on the device than promised, nothing copied back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diptych.attention import LocalAttend
from diptych.bench.geometry import Geometry, random_inputs, random_transformer
from diptych.memory import fp8
from diptych.memory.footprint import Setting, transformer_weights
from diptych.memory.host import Packed, host_bytes
from diptych.memory.offload import Offloaded
from diptych.memory.precision import EXACT, FP8, Precision
from diptych.memory.tables import ModulationTables, modulation_layers, park
from diptych.model.config import TINY

CPU = torch.device("cpu")
SIZE = Geometry.parse("160x96x9")
CONFIG = replace(TINY, num_visual_blocks=7)
TWO_SIZES = Precision("fp8", first=1, last=2)


class Lab:
    """A random transformer of seven blocks and one forward of it."""

    def __init__(self, precision: Precision = EXACT) -> None:
        self.model = random_transformer(CONFIG, CPU, torch.float32)
        if precision.kind == "fp8":
            fp8.quantise(self.model, exact_first=precision.first, exact_last=precision.last)
        self.inputs = random_inputs(CONFIG, SIZE, 5, CPU, torch.float32)
        with torch.no_grad():
            self.context = self.model.context(self.inputs.text, self.inputs.pooled, None)
            self.modulations = self.model.modulations(self.inputs.timestep, self.context, audio=True)
        self.grid = self.model.grid(*SIZE.latents, SIZE.audio_tokens, tail=False, device=CPU)

    @torch.no_grad()
    def embed(self):
        return self.model.embed(
            self.inputs.video, self.inputs.audio, self.context, self.grid, self.modulations, LocalAttend()
        )

    @torch.no_grad()
    def forward(self):
        return self.model.head(self.model.blocks(self.embed(), LocalAttend(), own=True))

    def offload(self) -> Offloaded:
        park(self.model)
        return Offloaded(self.model, CPU, self.model.fused_blocks, leave_out=list(modulation_layers(self.model)))


def same(got, want) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("precision", [EXACT, FP8, TWO_SIZES], ids=str)
def test_the_same_bits_however_many_blocks_stay(precision):
    lab = Lab(precision)
    want = lab.forward()
    moved = lab.offload()
    for resident in (0, 3, None):
        moved.load(resident)
        assert same(lab.forward(), want) and same(lab.forward(), want), f"{resident} resident"


@pytest.mark.parametrize("resident", [0, 2, 4])
def test_two_blocks_more_than_stay_are_on_the_device_and_no_third(resident):
    lab = Lab()
    moved = lab.offload()
    moved.load(resident)
    seen = []
    for index, block in enumerate(lab.model.fused_blocks):
        block.register_forward_pre_hook(lambda module, args, n=index: seen.append((n, moved.on_device)))
    lab.forward()
    assert [n for n, _ in seen] == list(range(7))
    assert all(n in held and len(held) == resident + 2 for n, held in seen)
    assert moved.device_bytes == moved.outer_bytes + (resident + 2) * moved.layer_bytes


@pytest.mark.parametrize("resident", range(8))
def test_blocks_of_two_sizes_take_what_is_predicted(resident):
    """Slots are as large as the largest block that streams; each tensor begins at a multiple of 256 bytes."""
    lab = Lab(TWO_SIZES)
    weights = transformer_weights(CONFIG, Setting(itemsize=4, precision=TWO_SIZES))
    moved = lab.offload()
    moved.load(resident)
    lab.forward()
    assert len(set(weights.each)) == 2 and weights.each[0] == weights.each[5] == weights.each[6] == weights.block
    tensors = sum(1 for block in lab.model.fused_blocks for _ in (*block.parameters(), *block.buffers()))
    over = moved.device_bytes - moved.outer_bytes - weights.held(resident)
    assert 0 <= over < 256 * tensors < weights.block - min(weights.each)


def test_a_forward_fetches_what_streams_once_and_nothing_else():
    lab = Lab()
    moved = lab.offload()
    moved.load(3)
    lab.forward()
    before = moved.fetched
    lab.forward()
    assert moved.fetched - before == 4 * moved.layer_bytes


def test_a_cache_that_skips_blocks_moves_nothing():
    lab = Lab()
    moved = lab.offload()
    moved.load(0)
    lab.forward()
    before = moved.fetched
    lab.model.head(lab.embed())
    assert moved.fetched == before


def test_blocks_called_out_of_turn_are_fetched_then():
    """A first-block cache runs block 0 over and over, and now and then the others."""
    lab = Lab()
    streams = lab.embed()
    with torch.no_grad():
        want = [lab.model.blocks(streams, LocalAttend(), n, n + 1).video for n in range(7)]
    moved = lab.offload()
    moved.load(0)
    for n in (0, 0, 1, 0, 5, 2, 6, 0, 3, 4, 4):
        with torch.no_grad():
            assert torch.equal(lab.model.blocks(streams, LocalAttend(), n, n + 1).video, want[n])
        assert len(moved.on_device) == 2


def test_host_memory_is_read_and_never_written():
    lab = Lab()
    moved = lab.offload()
    before = [packed.host.clone() for packed in (moved._outer, *moved._packed)]
    moved.load(2)
    lab.forward()
    moved.drop()
    moved.load(None)
    lab.forward()
    assert all(torch.equal(a, p.host) for a, p in zip(before, (moved._outer, *moved._packed), strict=True))


def test_dropped_weights_cannot_be_run():
    lab = Lab()
    moved = lab.offload()
    assert moved.device_bytes == 0 and moved.on_device == []
    with pytest.raises(AssertionError, match="load them first"):
        lab.model.fused_blocks[0](*[None] * 9)
    with pytest.raises(RuntimeError):
        lab.embed()
    moved.load(1)
    moved.drop()
    assert moved.device_bytes == 0 and all(p.numel() == 0 for p in lab.model.out_layer.out_layer.parameters())


def test_loading_again_in_the_same_way_moves_nothing_and_in_another_way_frees_first():
    lab = Lab()
    moved = lab.offload()
    moved.load(4)
    before = moved.fetched
    moved.load(4)
    assert moved.fetched == before
    moved.load(0)
    assert len(moved.on_device) == 2


def test_tables_in_host_memory_hold_the_same_bits():
    lab = Lab()
    timesteps = torch.tensor([900.0, 400.0])
    park(lab.model)
    here = ModulationTables(lab.model, timesteps, [lab.context], audio=True)
    there = ModulationTables(lab.model, timesteps, [lab.context], audio=True, on_host=True)
    for timestep in timesteps:
        a, b = (table.at(timestep, lab.context) for table in (here, there))
        assert type(a) is type(b) and same(a.text_video + a.text_audio, b.text_video + b.text_audio)
        assert all(same(x, y) for x, y in zip(a.blocks, b.blocks, strict=True))
        assert torch.equal(a.head_video, b.head_video) and torch.equal(a.head_audio, b.head_audio)


def test_strides_dtypes_and_shared_tensors_survive_packing():
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last), requires_grad=False)
    module.b = torch.nn.Parameter(module.a.data[1:], requires_grad=False)
    module.register_buffer("c", torch.arange(5, dtype=torch.int8))
    module.register_buffer("d", torch.randn(3).to(torch.float8_e4m3fn))
    want = {name: (t.clone(), t.stride()) for name, t in (*module.named_parameters(), *module.named_buffers())}
    packed = Packed([module])
    packed.pack(host_bytes(packed.nbytes, page_locked=False))
    assert packed.nbytes == 3 * 256, "the two that share memory are packed once"
    copied = host_bytes(packed.nbytes, page_locked=False)
    packed.attach(copied)
    copied.copy_(packed.host)  # as on a GPU, where the bytes arrive after the module was pointed at them
    for name, t in (*module.named_parameters(), *module.named_buffers()):
        assert t.dtype == want[name][0].dtype and t.stride() == want[name][1], name
        assert torch.equal(t.float(), want[name][0].float()), name


@pytest.mark.parametrize("precision", [EXACT, FP8, TWO_SIZES], ids=str)
def test_the_feed_forward_in_parts_is_the_whole_to_rounding(precision):
    lab = Lab(precision)
    want = lab.forward()
    calls = []
    for block in lab.model.fused_blocks:
        block.video_dec_block.feed_forward.rows = 50
        block.video_dec_block.feed_forward.net[2].register_forward_hook(
            lambda module, args, out: calls.append(out.shape[1])
        )
    got = lab.forward()
    assert calls == [50, 50, 50, 30] * 7
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-6)
