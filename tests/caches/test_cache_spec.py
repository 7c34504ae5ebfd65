"""What a user may write after `--cache`, and what is refused in one sentence."""

from __future__ import annotations

import pytest

from diptych.engine.engine import Engine
from diptych.engine.options import pick_cache
from diptych.errors import RequestError
from diptych.model.checkpoint import Checkpoint
from diptych.request import ClipRequest
from diptych.sampling.caches import CACHES, parse
from diptych.sampling.caches.magcache import MagCacheSettings
from diptych.sampling.caches.navicache import NaviCacheSettings
from diptych.sampling.caches.spec import describe


@pytest.mark.parametrize("name", CACHES)
def test_every_cache_has_defaults_and_says_them(name):
    assert parse(describe(parse(name))) == parse(name)


def test_values_by_place_and_by_name():
    assert parse("magcache:0.24,3,0.1") == MagCacheSettings(0.24, 3, 0.1)
    assert parse(" magcache : 0.24 , retention=0.3") == MagCacheSettings(0.24, 2, 0.3)
    assert parse("magcache:,1") == MagCacheSettings(0.12, 1, 0.2)
    assert parse("navicache:0.1,align=4,last=2") == NaviCacheSettings(0.1, 0, 4, 2)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("magcash", "no such cache; did you mean magcache?"),
        ("", "no such cache; known are magcache, navicache"),
        ("magcache:fast", "cache magcache: threshold = 'fast' is not accepted: a number from 0 to 10"),
        ("magcache:nan", "threshold = 'nan' is not accepted"),
        ("magcache:0.1,2.5", "max_run = '2.5' is not accepted: a whole number from 0 to 1000"),
        ("magcache:0.1,2,0.2,0,1", "magcache takes threshold, max_run, retention, last"),
        ("magcache:align=3", "magcache has no align; it takes threshold, max_run, retention, last"),
        ("magcache:0.1,threshold=0.2", "threshold once"),
        ("taylor:4", "order = '4' is not accepted: a whole number from 0 to 3"),
        ("record:1", "record takes no values"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(text, sentence):
    with pytest.raises(RequestError) as error:
        parse(text)
    assert sentence in str(error.value)


@pytest.mark.parametrize("name", CACHES)
def test_a_distilled_checkpoint_refuses_every_cache_by_name(name, tiny_distilled):
    with pytest.raises(RequestError, match=f"cache = '{name}' is not accepted: a distilled checkpoint"):
        Engine.load(tiny_distilled, device="cpu", cache=name)


def test_none_is_exact(tiny_distilled):
    assert pick_cache("none", Checkpoint.open(tiny_distilled)) is None


@pytest.mark.parametrize(("name", "needs"), [("magcache", "ratios"), ("teacache", "a polynomial")])
def test_what_was_never_measured_is_refused_before_anything_runs(name, needs, tiny_base, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    checkpoint = Checkpoint.open(tiny_base)
    plan = pick_cache(name, checkpoint)
    with pytest.raises(RequestError, match=f"it needs {needs} measured on this checkpoint for t2va; run diptych cal"):
        plan.check(ClipRequest("x").resolve(checkpoint.defaults))
