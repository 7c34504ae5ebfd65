"""What a trace says is what happened."""

from __future__ import annotations

import layouts_work as work
import pytest
from PIL import Image
from test_layouts import BASE
from typer.testing import CliRunner

from diptych.cli.main import app
from diptych.engine.engine import Engine
from diptych.engine.lanes import all_busy, read_traces, summarise, union, waiting
from diptych.engine.tracing import EXCHANGE, KINDS, Exchange, RankTrace, StepTrace
from diptych.errors import MediaError
from diptych.request import ClipRequest

REQUEST = ClipRequest("a red circle", **BASE)


def trace_of(rank, exchanges, end=10.0):
    step = StepTrace(0.0, end, exchanges=[Exchange("g", "all", 8, *times) for times in exchanges])
    step.sums = dict.fromkeys(KINDS, 0.0) | {EXCHANGE: sum(x.end - x.start for x in step.exchanges)}
    return RankTrace(rank, "cpu", 1, [step])


def test_waiting_ends_when_the_last_rank_arrives():
    early = trace_of(0, [(1.0, 1.0, 4.0), (6.0, 7.0, 8.0)])
    late = trace_of(1, [(3.0, 3.0, 4.0), (6.5, 6.5, 8.0)])
    assert waiting([early, late]) == {0: 2.0, 1: 0.0}
    first, second = summarise([early, late])["ranks"]
    assert first["seconds_per_step"]["waiting"] == 2.0
    assert first["seconds_per_step"]["communication"] == 2.0
    assert second["seconds_per_step"] | {"waiting": 0.0, "communication": 2.5} == second["seconds_per_step"]


def test_all_busy_is_the_time_in_which_nobody_stands_still():
    early = trace_of(0, [(1.0, 1.0, 4.0)])
    late = trace_of(1, [(3.0, 3.0, 5.0)])
    assert all_busy([early, late]) == pytest.approx(0.6)
    assert all_busy([early, trace_of(1, [], end=8.0)]) == pytest.approx(0.5), "a rank that is done is not busy"


def test_union():
    assert union([(3, 4), (0, 1), (0.5, 2), (2, 2.5), (9, 9)]) == [(0, 2.5), (3, 4)]


def test_one_rank(tiny_base, tmp_path):
    with Engine.load(tiny_base, device="cpu", trace=tmp_path / "t") as engine:
        clip = engine.generate(REQUEST)
        plain = engine.generate(REQUEST)
    assert (clip.frames == plain.frames).all()
    (rank,) = clip.report["trace"]["ranks"]
    seconds = rank["seconds_per_step"]
    assert seconds["communication"] == seconds["waiting"] == rank["bytes_per_block"] == 0
    assert seconds["attention"] > 0 and seconds["linear"] > 0
    assert sum(seconds.values()) * BASE["steps"] < clip.report["seconds"]["denoise"]
    assert clip.report["trace"]["all_busy"] == 1.0


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["ulysses=2", "ring=2,ulysses=2"])
def test_ranks_tell_the_bytes_that_the_formulas_tell(layout, tiny_base, tmp_path, ranks):
    world = 2 if layout == "ulysses=2" else 4
    every = ranks(world)(work.traced, layout, str(tiny_base), REQUEST, str(tmp_path / "t"), seconds=120)
    told = every[0]["report"]["trace"]
    assert [rank["bytes_per_block"] for rank in told["ranks"]] == [rank["expected"] for rank in every]
    assert 0 < told["all_busy"] < 1
    for rank in told["ranks"]:
        assert rank["seconds_per_step"]["communication"] > 0
    read = read_traces(tmp_path / "t")
    assert summarise(read) == told
    done = CliRunner().invoke(app, ["trace", str(tmp_path / "t")])
    assert done.exit_code == 0
    assert "all ranks computed" in done.output
    picture = Image.open(tmp_path / "t" / "trace.png")
    assert picture.width > 1000
    assert len(set(picture.convert("RGB").resize((64, 64)).getdata())) > 20, "the picture shows something"


def test_a_folder_without_traces_is_refused(tmp_path):
    with pytest.raises(MediaError, match="holds no traces"):
        read_traces(tmp_path)
    (tmp_path / "rank-0.json").write_text('{"rank": 0')
    with pytest.raises(MediaError, match="damaged"):
        read_traces(tmp_path)
