"""The requests that peers' documents print, the rules for sizes and lengths, and Idempotency-Key."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tests.server.bad_requests import PNG
from tests.server.serving import Serving

from diptych.request import ClipDefaults
from diptych.server.api.create import normalise, remix_fields
from diptych.server.api.fields import read_fields
from diptych.server.problems import Problem
from diptych.server.settings import SettingsError, load

server = pytest.mark.server
RELEASED = ClipDefaults()
DISTILLED = ClipDefaults(steps=10, guidance=1.0, distilled=True)


def form(**fields: str) -> list[tuple[str, tuple[None, str]]]:
    """What curl -F name=value sends."""
    return [(name, (None, value)) for name, value in fields.items()]


GOLDEN: dict[str, dict[str, Any]] = {
    "vllm-omni -F": {
        "files": form(prompt="A cat", size="864x480", num_frames="125", num_inference_steps="50", seed="42")
    },
    "vllm-omni smoke": {
        "files": form(prompt="A cat", size="512x320", num_frames="25", num_inference_steps="10")
    },
    "vllm-omni extra_params": {"files": form(prompt="A cat", extra_params='{"sample_audio": false}')},
    "sglang JSON": {
        "json": {
            "prompt": "A cat", "size": "768x512", "num_frames": 121, "fps": 24, "seed": 42, "enable_cache_dit": False
        }
    },
    "sglang --form-string with an image": {
        "files": [
            *form(prompt="A cat", size="384x256", num_frames="17", num_inference_steps="2", enable_cache_dit="false"),
            ("input_reference", ("ref.png", PNG, "image/png")),
        ]
    },
    "openai names in JSON": {"json": {"prompt": "A cat", "size": "720x1280", "seconds": "8", "model": "fake"}},
    "litellm extra_body in JSON": {"json": {"prompt": "A cat", "extra_body": {"extra_params": {"seed": 4}}}},
    "brackets": {"files": form(**{"prompt": "A cat", "extra_params[seed]": "4", "extra_params[fps]": "12.5"})},
    "peers' other fields": {
        "json": {"prompt": "A cat", "flow_shift": 5, "enable_teacache": True, "profile": False, "true_cfg_scale": None}
    },
}  # fmt: skip


@server
@pytest.mark.parametrize("name", GOLDEN)
def test_requests_that_peers_print_are_accepted(api: httpx.Client, name: str) -> None:
    running = api.post("/v1/videos", json={"prompt": "slow=0.05", "num_inference_steps": 200}).json()["id"]
    answer = api.post("/v1/videos", **GOLDEN[name])
    assert answer.status_code == 200, answer.text
    job = answer.json()
    for video in (job["id"], running):
        api.delete("/v1/videos/" + video)
    wanted = {
        "vllm-omni -F": {"size": "864x480", "num_frames": 125, "num_inference_steps": 50, "seed": 42, "seconds": "5"},
        "vllm-omni smoke": {"size": "512x320", "num_frames": 25, "num_inference_steps": 10},
        "vllm-omni extra_params": {"has_audio": False},
        "sglang JSON": {"size": "768x512", "num_frames": 121, "fps": 24, "seed": 42},
        "sglang --form-string with an image": {"size": "384x256", "task": "i2va", "num_inference_steps": 2},
        "openai names in JSON": {"size": "720x1280", "seconds": "8", "num_frames": 193},
        "litellm extra_body in JSON": {"seed": 4},
        "brackets": {"seed": 4, "fps": 12.5},
        "peers' other fields": {"ignored_params": ["enable_teacache", "flow_shift"]},
    }[name]
    assert {k: job[k] for k in wanted} == wanted


CURL = {
    "vllm-omni": "-F prompt='A cat' -F size=512x320 -F num_frames=25 -F num_inference_steps=10 -F seed=42",
    "sglang": """-H 'Content-Type: application/json' -d '{"prompt": "A cat", "size": "512x320", "num_frames": 25,
        "fps": 24, "seed": 42, "num_inference_steps": 10, "enable_cache_dit": false}'""",
    "sglang with an image": """--form-string 'prompt=A cat' --form-string size=512x320 --form-string num_frames=25
        --form-string num_inference_steps=10 --form-string seed=42 --form-string enable_cache_dit=false
        -F 'input_reference=@ref.png;type=image/png'""",
}


@server
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("line", CURL)
def test_the_lines_that_peers_print_make_clips_with_curl_itself(served: Serving, tmp_path: Path, line: str) -> None:
    (tmp_path / "ref.png").write_bytes(PNG)

    def curl(path: str, words: str = "") -> bytes:
        command = ["curl", "-sS", "--fail-with-body", served.url + path, *shlex.split(words)]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True).stdout

    video = json.loads(curl("/v1/videos", "-X POST " + CURL[line]))["id"]
    served.until(video, "completed")
    job = json.loads(curl(f"/v1/videos/{video}"))
    got = [job[k] for k in ("size", "num_frames", "num_inference_steps", "seed", "task")]
    assert got == ["512x320", 25, 10, 42, "i2va" if "image" in line else "t2va"]
    assert curl(f"/v1/videos/{video}/content")[4:8] == b"ftyp"


def spec(defaults: ClipDefaults = RELEASED, **fields: Any) -> dict[str, Any]:
    given, ignored = read_fields({"prompt": "a lamp", **fields})
    return normalise(given, ignored, None, defaults, load(["some/model"]))


@pytest.mark.parametrize(
    ("fields", "frames"),
    [
        ({}, 121),
        ({"num_frames": 119}, 117),
        ({"num_frames": 120}, 121),
        ({"num_frames": 125}, 125),
        ({"seconds": "4"}, 97),
        ({"seconds": 8}, 193),
        ({"seconds": "12"}, 289),
        ({"seconds": 5, "num_frames": 121}, 121),
        ({"seconds": 2, "fps": 12}, 25),
    ],
)
def test_the_frames_drawn_are_4k_plus_1(fields: dict[str, Any], frames: int) -> None:
    assert spec(**fields)["num_frames"] == frames


@pytest.mark.parametrize(
    ("size", "seconds", "fits"),
    [("1280x720", 8, True), ("1792x1024", 4, True), ("864x480", 20, True), ("1792x1024", 8, False)],
)
def test_the_token_limit_is_where_the_contract_puts_it(size: str, seconds: int, fits: bool) -> None:
    if fits:
        assert spec(size=size, seconds=seconds)["warnings"] == ["outside_trained_shape"]
    else:
        with pytest.raises(Problem, match="video tokens"):
            spec(size=size, seconds=seconds)


def test_the_work_of_one_request_can_be_limited() -> None:
    fields = {"prompt": "a lamp", "size": "64x64", "num_frames": 5, "num_inference_steps": 10, "n": 2}
    given, ignored = read_fields(fields)
    work = 2 * 4 * 4 * 10 * 2
    normalise(given, ignored, None, RELEASED, load(["some/model", "--max-work", str(work)]))
    with pytest.raises(Problem, match=f"work of at most {work - 1} token steps; this is {work}"):
        normalise(given, ignored, None, RELEASED, load(["some/model", "--max-work", str(work - 1)]))


def test_a_distilled_checkpoint_takes_guidance_1_and_ignores_a_negative_prompt() -> None:
    assert spec(DISTILLED)["guidance_scale"] == 1.0
    assert spec(DISTILLED, negative_prompt="blur")["ignored_params"] == ["negative_prompt"]
    with pytest.raises(Problem, match="takes only 1") as refused:
        spec(DISTILLED, guidance_scale=5)
    assert refused.value.param == "guidance_scale"


def test_a_server_that_approximates_promises_nothing_exact() -> None:
    fp8 = load(["some/model", "--precision", "fp8"])
    given = read_fields({"prompt": "a lamp"})[0]
    assert normalise(given, [], None, RELEASED, fp8)["quality"] == "high"
    for word in ("exact", "lossless"):
        with pytest.raises(Problem, match="computes in fp8") as refused:
            normalise(given | {"quality": word}, [], None, RELEASED, fp8)
        assert refused.value.code == "feature_not_enabled"


@pytest.mark.parametrize(
    ("asked", "cache", "quality"),
    [
        ({}, None, "lossless"),
        ({"quality": "extra-high"}, None, "extra-high"),
        ({"quality": "high"}, "taylor", "high"),
        ({"enable_cache_dit": "true"}, "taylor", "high"),
        ({"quality": "high", "enable_cache_dit": False}, None, "high"),
    ],
)
def test_a_step_cache_is_used_where_it_was_asked_for_and_a_remix_asks_again(
    asked: dict[str, Any], cache: str | None, quality: str
) -> None:
    with_cache, without = load(["some/model", "--cache", "taylor"]), load(["some/model"])
    given = read_fields({"prompt": "a lamp", "seed": 1} | asked)[0]
    made = normalise(given, [], None, RELEASED, with_cache)
    assert (made.get("cache"), made["quality"], "step_cache" in made["warnings"]) == (cache, quality, cache is not None)
    assert normalise(remix_fields(made, {}), [], None, RELEASED, with_cache) == made
    for exact in ({"quality": "exact"}, {"enable_cache_dit": False}):
        again = normalise(remix_fields(made, read_fields(exact)[0]), [], None, RELEASED, with_cache)
        assert "cache" not in again
    if "enable_cache_dit" not in given:
        assert "cache" not in normalise(given, [], None, RELEASED, without), "high allows a cache, it demands none"


def test_exact_and_cached_at_once_is_a_contradiction() -> None:
    given = read_fields({"prompt": "a lamp", "quality": "lossless", "enable_cache_dit": True})[0]
    with pytest.raises(Problem, match="quality = 'lossless' is not accepted: high, since enable_cache_dit is on") as no:
        normalise(given, [], None, RELEASED, load(["some/model", "--cache", "magcache"]))
    assert no.value.code == "conflicting_parameters"


@pytest.mark.parametrize("precision", ["exact", "fp8", "fp8:1", "fp8:steps=1,first=2,last=2"])
def test_precisions_that_exist_are_taken(precision: str) -> None:
    settings = load(["some/model", "--precision", precision])
    made = normalise(read_fields({"prompt": "a lamp"})[0], [], None, RELEASED, settings)
    assert ("precision_fp8" in made["warnings"]) == (precision != "exact")


@pytest.mark.parametrize("precision", ["8bit", "nf4"])
def test_a_language_model_in_fewer_bits_is_an_approximation_too(precision: str) -> None:
    given = read_fields({"prompt": "a lamp"})[0]
    for flags, told in (([], ""), (["--precision", "fp8"], "fp8 and ")):
        rounded = load(["some/model", "--text-precision", precision, *flags])
        made = normalise(given, [], None, RELEASED, rounded)
        assert made["quality"] == "high"
        assert f"text_precision_{precision}" in made["warnings"]
        with pytest.raises(Problem, match=f"computes in {told}text precision {precision}, so only high") as refused:
            normalise(given | {"quality": "exact"}, [], None, RELEASED, rounded)
        assert refused.value.code == "feature_not_enabled"
    with pytest.raises(SettingsError, match="--text-precision"):
        load(["some/model", "--text-precision", "4bit"])


@pytest.mark.parametrize("precision", ["fp4", "fp8:", "fp8:x", "exact:1", "fp8:first=x"])
def test_a_precision_that_does_not_exist_is_refused_in_one_sentence(precision: str) -> None:
    with pytest.raises(SettingsError, match=f"--precision = '{precision}': exact, fp8, fp8:1 for"):
        load(["some/model", "--precision", precision])


def test_the_quality_words_become_constant_rate_factors() -> None:
    words = ("maximum", "high", "default", "medium", "low")
    assert [spec(output_quality=w)["crf"] for w in words] == [12, 16, 18, 23, 28]
    assert [spec(output_quality="low", output_compression=c)["crf"] for c in (0, 100)] == [0, 51]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"size": "64x96"}, {"width": 64, "height": 96}),
        ({"seconds": 1}, {"num_frames": 25}),
        ({"n": 3}, {"seeds": [5, 6, 7]}),
        ({"output_quality": "low"}, {"crf": 28}),
        ({"prompt": "other"}, {"prompt": "other", "width": 96, "crf": 12, "seeds": [5, 6]}),
    ],
)
def test_a_remix_drops_what_a_change_contradicts(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    source = spec(size="96x64", num_frames=9, n=2, seed=5, output_quality="maximum")
    again = normalise(remix_fields(source, read_fields(changes)[0]), [], None, RELEASED, load(["some/model"]))
    assert {k: again[k] for k in expected} == expected


# -- Idempotency-Key ----------------------------------------------------------------------------------


@server
def test_the_same_key_and_body_is_the_same_job_also_at_once_and_after_a_restart(tmp_path: Path) -> None:
    with Serving(tmp_path / "state") as serving:
        answers: list[httpx.Response] = []

        def post(body: dict[str, Any], key: str = "key-1", path: str = "/v1/videos") -> httpx.Response:
            with serving.client as client:
                answer = client.post(path, json=body, headers={"Idempotency-Key": key})
            answers.append(answer)
            return answer

        threads = [threading.Thread(target=post, args=({"prompt": "a lamp"},)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({a.json()["id"] for a in answers}) == 1
        assert sum("idempotent-replayed" in a.headers for a in answers) == 7
        video = answers[0].json()["id"]
        assert len(list((serving.state / "jobs").iterdir())) == 1
        serving.until(video, "completed")
        serving.kill()
        serving.restart()
        again = post({"prompt": "a lamp"})
        assert (again.json()["id"], again.json()["status"]) == (video, "completed")
        assert again.headers["idempotent-replayed"] == "true"
        other = post({"prompt": "a candle"})
        assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
        assert post({"prompt": ""}, "key-2").status_code == 400
        assert post({"prompt": "now right"}, "key-2").status_code == 200, "a refusal uses up no key"
        assert post({"prompt": "a lamp"}, "key-1", f"/v1/videos/{video}/remix").json()["id"] != video, "own scope"
