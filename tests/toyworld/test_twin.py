"""The distilled twin: it starts as its teacher, is held to the guided teacher on its own path, is sampled by PiFlow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tools.toyworld import export, flow, scores, twin
from tools.toyworld.imitation import Imitation, Own, Policy, noised
from tools.toyworld.judging import Parts, denoise
from tools.toyworld.pool import Features, Latents
from tools.toyworld.training import Step, set_rate
from torch import Tensor, nn

from diptych.bench.score import MEASURES
from diptych.bench.score_engine import score_engine
from diptych.bench.toyworld_captions import score_prompts
from diptych.engine.engine import Engine
from diptych.errors import RequestError
from diptych.model.catalogue import BUILT_IN
from diptych.model.checkpoint import Checkpoint
from diptych.request import ClipRequest
from diptych.sampling.schedules import PiFlowSchedule, schedule_for

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
SCHEDULE = PiFlowSchedule(twin.STEPS, flow.SHIFT)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(SCHEDULE, CPU)


@pytest.fixture(scope="module")
def teacher() -> nn.Module:
    """The stock class with every weight at work."""
    torch.manual_seed(0)
    model = flow.build()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.08)
    return model.requires_grad_(False)


def noise(*shape: int) -> Tensor:
    return torch.randn(2, *shape)


@pytest.fixture
def work(teacher: nn.Module, policy: Policy) -> Imitation:
    """Two clips with captions of their own."""
    torch.manual_seed(0)
    data = Latents(noise(9, 4, 6, 16), noise(4, 6, 16), noise(4, 6, 16).abs(), noise(60, 40), 1.0, 1.0)
    words = Features(noise(6, 96), torch.tensor([[True] * 6, [True] * 4 + [False] * 2]), noise(64))
    none = Features(torch.randn(1, 6, 96), torch.tensor([[True] * 3 + [False] * 3]), torch.randn(1, 64))
    return Imitation(twin.build(teacher), teacher, data, words, none, policy, 3.0, dtype=torch.float32)


def stock(model: nn.Module, video: Tensor, audio: Tensor, text: Features, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Velocities by the stock class."""
    out: tuple[Tensor, Tensor] = model(
        hidden_states=torch.cat([video, torch.zeros_like(video), torch.zeros_like(video[..., :1])], dim=-1),
        audio_hidden_states=audio,
        encoder_hidden_states=text.hidden,
        encoder_attention_mask=text.mask,
        pooled_projections=text.pooled,
        timestep=1000 * sigma,
        return_dict=False,
    )
    return out


@torch.no_grad()
def test_the_twin_starts_as_its_teacher(work: Imitation, policy: Policy) -> None:
    """At a segment's start its velocity is the teacher's, and its path is the teacher's Euler step."""
    index = torch.arange(2)
    start = noised(work.data, policy, "text", index)
    begin, end = torch.zeros(2, dtype=torch.long), policy.substeps[start.segment]
    sigma = policy.sigma(start.segment)
    for x, u, v in zip(
        start.streams,
        work.predictions(start),
        stock(work.teacher, *start.streams, work.text.rows(index), sigma),
        strict=True,
    ):
        torch.testing.assert_close(policy.velocity(x, u, start.segment, begin, x), v, rtol=0, atol=5e-5)
        step = (policy.sigma(start.segment, end) - sigma).view(-1, *[1] * (x.ndim - 1))
        torch.testing.assert_close(policy.reached(x, u, start.segment, end), x + step * v, rtol=0, atol=5e-5)


@pytest.mark.parametrize("index", range(twin.STEPS))
def test_a_rollout_follows_its_own_velocity_to_where_sampling_arrives(policy: Policy, index: int) -> None:
    x, u = torch.randn(1, 5, 16, dtype=torch.float64), torch.randn(1, 5, 10, 16, dtype=torch.float64)
    segment, here = torch.tensor([index]), x
    for substep in range(int(policy.substeps[index])):
        at = torch.tensor([substep])
        torch.testing.assert_close(policy.reached(x, u, segment, at), here, rtol=0, atol=1e-5)
        move = policy.sigma(segment, at + 1) - policy.sigma(segment, at)
        here = here + move * policy.velocity(x, u, segment, at, here)
    torch.testing.assert_close(policy.reached(x, u, segment, policy.substeps[segment]), here, rtol=0, atol=1e-5)
    sampled = SCHEDULE.step(index, x.float(), u.float().flatten(2))
    torch.testing.assert_close(here.float(), sampled, rtol=0, atol=1e-5)


def test_every_substep_that_sampling_asks_for_is_drawn(policy: Policy) -> None:
    torch.manual_seed(0)
    for index in (0, twin.STEPS - 1):
        drawn = policy.draw(torch.full((2000,), index))
        assert set(drawn.tolist()) == set(range(len(SCHEDULE.rollout(index)) - 1))


@torch.no_grad()
def test_the_target_is_the_guided_teacher(work: Imitation, policy: Policy) -> None:
    index = torch.arange(2)
    start = noised(work.data, policy, "text", index)
    at = policy.draw(start.segment)
    sigma = policy.sigma(start.segment, at)
    none = Features(*(t.expand(2, *t.shape[1:]) for t in (work.none.hidden, work.none.mask, work.none.pooled)))
    cond = stock(work.teacher, *start.streams, work.text.rows(index), sigma)
    uncond = stock(work.teacher, *start.streams, none, sigma)
    for v, c, u in zip(work.target(start, start.streams, at), cond, uncond, strict=True):
        torch.testing.assert_close(v, u + 3.0 * (c - u), rtol=0, atol=2e-4)


def test_what_the_twin_denoises_moves_on_by_a_segment(work: Imitation, policy: Policy) -> None:
    own = Own(work.data, policy, "image", 2)
    own.now.segment.copy_(torch.tensor([3, twin.STEPS - 1]))
    before = [x.clone() for x in (*own.now.streams, own.now.tail)]
    with torch.no_grad():
        predicted = work.predictions(own.now)
    expected = [SCHEDULE.step(3, x, u.flatten(-2))[0] for x, u in zip(before, predicted, strict=False)]
    index = own.now.index.clone()
    torch.manual_seed(2)
    work.loss("image", torch.arange(2), own)
    assert own.now.segment.tolist() == [4, 0]
    assert own.now.index[0] == index[0]
    for x, wanted in zip(own.now.streams, expected, strict=True):
        torch.testing.assert_close(x[0], wanted, rtol=0, atol=2e-5)
        assert float(x[1].std()) == pytest.approx(1.0, abs=0.05)
        assert abs(float(x[1].mean())) < 0.1
    assert torch.equal(own.now.tail[0], before[2][0])
    assert not torch.equal(own.now.tail[1], before[2][1])


def test_the_twin_learns_from_every_kind_of_batch(work: Imitation, policy: Policy) -> None:
    optimizers = flow.optimizers(work.student)

    def step(kind: str) -> dict[str, float]:
        for optimizer in optimizers:
            set_rate(optimizer, 2e-3)
        torch.manual_seed(1)
        own = Own(work.data, policy, kind, 1)
        run = Step(lambda b: work.loss(kind, b["index"], own), work.student.parameters(), optimizers)
        return {name: value.item() for name, value in run({"index": torch.arange(1)}).items()}

    first = step("text")
    for kind in dict.fromkeys(flow.KINDS):
        assert ("audio" in step(kind)) == (kind != "mute")
    later = [step("text") for _ in range(4)][-1]
    assert later["video"] < 0.9 * first["video"]
    assert later["audio"] < 0.9 * first["audio"]


def test_a_teacher_of_straight_paths_has_nothing_more_to_teach(work: Imitation) -> None:
    teacher = flow.build()
    for name in twin.HEADS:
        nn.init.normal_(teacher.get_parameter(f"{name}.bias"))
    work.teacher, work.student = teacher, twin.build(teacher)
    values = work.loss("text", torch.arange(2))
    assert values["video"].item() < 1e-8
    assert values["audio"].item() < 1e-8


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a training of one step leaves behind."""
    folder = tmp_path_factory.mktemp("twin")
    twin.train(folder, 1e-3, 2, clips=4, encode_seconds=1.0)
    return folder


def test_a_training_is_taken_up(trained: Path, tmp_path: Path) -> None:
    assert {file.name for file in trained.iterdir()} == {"twin.safetensors", "twin_raw.safetensors", "twin.jsonl"}
    assert all(file.stat().st_size < 2**24 for file in trained.iterdir())
    model = twin.build(Parts.open(BUILT_IN, CPU).transformer)
    average = flow.resume(trained, model, "twin")
    start = [p.detach().clone() for p in average.live]
    twin.train(tmp_path, 1e-3, 2, clips=4, encode_seconds=1.0, state=trained, rate=0.0)
    again = flow.resume(tmp_path, twin.build(Parts.open(BUILT_IN, CPU).transformer), "twin")
    for a, b in zip(start, again.live, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    told = [json.loads(line) for line in (trained / "twin.jsonl").read_text().splitlines()]
    assert told[0]["clips"] == 4
    assert told[-1]["step"] >= 1


@pytest.fixture(scope="module")
def checkpoint(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export.export_twin(tmp_path_factory.mktemp("checkpoint"), trained / "twin.safetensors", BUILT_IN)


def test_diptych_and_stock_diffusers_run_the_checkpoint(checkpoint: Path) -> None:
    from diffusers import Kandinsky6TI2VAPipeline

    found = Checkpoint.open(checkpoint)
    assert found.distilled
    assert schedule_for(found.scheduler, twin.STEPS, "diffusers") == SCHEDULE
    assert (found.defaults.steps, found.defaults.guidance, found.defaults.frames) == (twin.STEPS, 1.0, 49)
    prompt = "a red circle bounces on a blue floor"
    with Engine.load(checkpoint) as engine:
        clip = engine.generate(ClipRequest(prompt, frames=5, steps=2, seed=3))
    assert clip.report["forwards"] == {"computed": 2, "total": 2}
    pipe = Kandinsky6TI2VAPipeline.from_pretrained(checkpoint)
    pipe.set_progress_bar_config(disable=True)
    out = pipe(
        prompt,
        height=64,
        width=96,
        num_frames=5,
        num_inference_steps=2,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(3),
        max_sequence_length=48,
        output_type="np",
    )
    assert out.frames[0].shape == clip.frames.shape
    assert abs(255 * out.frames[0] - clip.frames).mean() < 0.6


def test_clips_for_judging_are_sampled_as_the_engine_samples_them(checkpoint: Path) -> None:
    """One forward a step, each rolled out: with a constant velocity v, noise less v."""
    parts = Parts.open(checkpoint, CPU)
    assert parts.factors == (pytest.approx(0.992522), pytest.approx(1.222882))
    asked = []

    def transformer(**inputs: Tensor) -> tuple[Tensor, Tensor]:
        asked.append((len(inputs["hidden_states"]), float(inputs["timestep"][0])))
        video, audio = inputs["hidden_states"], inputs["audio_hidden_states"]
        return torch.ones(*video.shape[:-1], 160), torch.ones(*audio.shape[:-1], 400)

    parts.transformer = transformer
    text = (torch.randn(1, 6, 96), torch.ones(1, 6, dtype=torch.bool), torch.randn(1, 64))
    video, audio = denoise(parts, text, text, SCHEDULE, guidance=1.0, seed=5)
    assert asked == [(1, pytest.approx(float(t))) for t in SCHEDULE.timesteps]
    generator = torch.Generator().manual_seed(5)
    for x in (video, audio):
        torch.testing.assert_close(x, torch.randn(x.shape, generator=generator) - 1, rtol=0, atol=2e-5)


@pytest.mark.parametrize("run", ["demo@ten", "demo@1@2@3"])
def test_a_run_that_cannot_be_read_is_refused(run: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is not accepted: FOLDER, FOLDER@STEPS or FOLDER@STEPS@GUIDANCE"):
        scores.scores(tmp_path / "scores.json", [run])
    assert not list(tmp_path.iterdir())


def test_a_twin_without_weights_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        export.export_twin(tmp_path / "twin", tmp_path / "missing.safetensors", BUILT_IN)
    assert not list(tmp_path.iterdir())


def test_scores_are_kept_seed_by_seed_and_stand_side_by_side(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "scores.json"
    table = scores.scores(file, [f"{checkpoint}@1"], prompts=1, seeds=1)
    kept = json.loads(file.read_text())
    (name,) = kept["runs"]
    assert name.endswith(", 1 steps, guidance 1")
    run = kept["runs"][name]
    assert run["forwards"] == 1
    assert run["measures"]["color"]["clips"] == 1
    assert name in table
    run["seeds"]["1"] = {"measures": {n: {"right": 1.0, "clips": 2} for n in run["measures"]}, "verdicts": []}
    run["seeds"]["0"]["verdicts"] = ["made before"]
    file.write_text(json.dumps(kept))
    before = run["seeds"]["0"]["measures"]["color"]["right"]
    again = scores.scores(file, [f"{checkpoint}@1", "demo@1@1"], prompts=1, seeds=1)
    kept = json.loads(file.read_text())
    assert list(kept["runs"][name]["seeds"]) == ["0", "1"]
    assert kept["runs"][name]["seeds"]["0"]["verdicts"] == ["made before"]
    assert list(kept["runs"]) == [name, "demo, 1 steps, guidance 1"]
    assert scores.together(kept["runs"][name]["seeds"])["color"] == {"right": before + 1.0, "clips": 3}
    assert "| forwards a clip | 1 | 1 | |" in again
    with pytest.raises(AssertionError, match="names of their folders"):
        scores.scores(file, ["demo@1@1", str(BUILT_IN) + "@1@1"], prompts=1, seeds=1)


def test_the_trained_twin_makes_what_was_asked_for_in_ten_forwards(tmp_path: Path) -> None:
    """A few prompts through the engine; the whole table is in docs/demo-model.md."""
    weights = ROOT / "tools" / "toyworld" / "weights" / "twin.safetensors"
    folder = export.export_twin(tmp_path / "twin", weights, BUILT_IN)
    with Engine.load(folder, device="cpu") as engine:
        chosen = score_prompts(2)
        result = score_engine(engine, chosen, [0])
        clip = engine.generate(ClipRequest("a red star", width=96, height=64, frames=9))
        assert clip.report["forwards"]["total"] == 10
    assert result is not None and len(result.verdicts) == 2
    assert result.total >= 0.85, result.table()


def test_the_document_tells_what_was_scored() -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "twin-score-2026-12-01.json").read_text())["runs"]
    page = (ROOT / "docs" / "demo-model.md").read_text().partition("## A distilled twin")[2]
    names = [*(f"demo, {steps} steps, guidance 3" for steps in (20, 10, 5)), "twin, 10 steps, guidance 1"]
    shares = {n: {m: v["right"] / v["clips"] for m, v in kept[n]["measures"].items()} for n in names}
    rows = {text: [shares[n][measure] for n in names] for measure, (text, _) in MEASURES.items()}
    goals = [measure for measure, (_, goal) in MEASURES.items() if goal]
    rows["mean of those with a goal"] = [sum(shares[n][m] for m in goals) / len(goals) for n in names]
    for text, row in rows.items():
        assert f"| {text} | " + " | ".join(f"{100 * share:.1f} %" for share in row) + " |" in page
    assert "| forwards a clip | " + " | ".join(str(kept[n]["forwards"]) for n in names) + " |" in page
