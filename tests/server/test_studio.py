"""The studio page in Chromium: what a visitor does with it, and how it looks in each dress."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.bad_requests import PNG
from tests.server.serving import Serving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.server,
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]
SECONDS = 20_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("studio") / "state") as found:
        yield found


@pytest.fixture
def page(browser: Any, serving: Serving) -> Iterator[Any]:
    """The page, open; any error in its console fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    found = context.new_page()
    found.set_default_timeout(SECONDS)
    problems: list[str] = []
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on(
        "console", lambda m: problems.append(m.text) if m.type == "error" and "status of 4" not in m.text else None
    )
    found.goto(serving.url + "/")
    found.wait_for_selector('#status[data-state="ready"], #status[data-state="busy"]')
    yield found
    context.close()
    assert problems == []


def artefact(page: Any, name: str, tmp_path: Path, **options: Any) -> bytes:
    """A screenshot, kept where CI collects it."""
    folder = Path(os.environ.get("DIPTYCH_ARTEFACTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    picture: bytes = page.screenshot(path=folder / f"studio-{name}.png", **options)
    return picture


def ask(page: Any, prompt: str, steps: int = 4) -> None:
    page.fill("#prompt", prompt)
    page.locator("#steps").fill(str(steps))
    page.click("#go")


def test_submit_watch_progress_and_preview_then_play_with_sound(page: Any) -> None:
    ask(page, "slow=0.2 a lighthouse at dusk", steps=12)
    card = page.locator(".making", has_text="lighthouse")
    card.get_by_text("step", exact=False).first.wait_for()
    card.locator("img").wait_for()
    assert card.locator("img").get_attribute("src").startswith("data:image/jpeg;base64,")
    first = float(card.locator("[role=progressbar]").get_attribute("aria-valuenow"))
    clip = page.locator(".clip:not(.failed)", has_text="lighthouse")
    clip.wait_for()
    assert first > 0
    assert card.count() == 0
    clip.locator(".open").click()
    video = page.locator("#viewer video")
    video.wait_for()
    deadline = time.monotonic() + 20
    while page.evaluate("document.querySelector('#viewer video').currentTime") == 0:
        assert time.monotonic() < deadline, "it does not play"
        page.wait_for_timeout(50)
    assert page.evaluate("document.querySelector('#viewer video').webkitAudioDecodedByteCount") > 0
    page.locator("#wave").wait_for()
    assert "96 × 64" in page.locator("#facts").inner_text()
    page.keyboard.press("Escape")
    page.locator("#viewer video").wait_for(state="detached")


def test_cancel_stops_what_is_being_made(page: Any, serving: Serving) -> None:
    ask(page, "slow=0.2 never to be finished", steps=150)
    card = page.locator(".making", has_text="never")
    card.get_by_text("step", exact=False).first.wait_for()
    card.get_by_role("button", name="Cancel").click()
    ended = page.locator(".clip.stopped", has_text="never")
    ended.wait_for()
    page.set_viewport_size({"width": 360, "height": 800})
    frame, words = (ended.locator(part).bounding_box() for part in (".frame", ".frame p"))
    assert words["x"] - frame["x"] >= 8, "what happened to it does not touch the edge"
    with serving.client as client:
        jobs = client.get("/v1/videos").json()["data"]
    assert next(j for j in jobs if "never" in j["prompt"])["error"]["code"] == "cancelled"


def test_run_again_is_one_click_and_edit_brings_the_parameters_back(page: Any, serving: Serving) -> None:
    with serving.client as client:
        fields = {"prompt": "two foxes", "size": "64x96", "num_inference_steps": 3, "seed": 77, "num_frames": 13}
        job = client.post("/v1/videos", json=fields).json()
        serving.until(job["id"], "completed")
        clip = page.locator(f'.clip[data-id="{job["id"]}"]')
        clip.wait_for()
        clip.get_by_role("button", name="Run again").click()
        page.locator(".clip", has_text="two foxes").nth(1).wait_for()
        again = client.get("/v1/videos?limit=1").json()["data"][0]
    same = ("prompt", "size", "num_inference_steps", "num_frames")
    assert [again[k] for k in same] == [job[k] for k in same]
    assert again["seed"] != 77
    assert again["remixed_from_video_id"] == job["id"]
    clip.locator(".open").click()
    page.locator("#viewer-actions").get_by_role("button", name="Edit").click()
    values = {i: page.locator(f"#{i}").input_value() for i in ("prompt", "steps", "seed", "frames")}
    assert values == {"prompt": "two foxes", "steps": "3", "seed": "77", "frames": "13"}
    assert page.locator("#based").is_visible()


def test_a_refused_input_is_explained_at_its_field(page: Any) -> None:
    page.fill("#prompt", "a lamp")
    page.fill("#seed", "tomorrow")
    page.click("#go")
    page.locator("#problem").wait_for()
    assert page.locator("#problem").inner_text().startswith("seed = 'tomorrow' is not accepted: a whole number")
    assert page.locator("#seed").get_attribute("aria-invalid") == "true"
    assert page.evaluate("document.activeElement.id") == "seed"
    page.fill("#seed", "")
    page.click("#go")
    page.locator("#problem").wait_for(state="hidden")


def test_an_image_can_be_dropped_and_shows_in_the_request(page: Any, serving: Serving, tmp_path: Path) -> None:
    (tmp_path / "first.png").write_bytes(PNG)
    page.evaluate(
        """async (bytes) => {
          const data = new DataTransfer();
          data.items.add(new File([new Uint8Array(bytes)], "first.png", { type: "image/png" }));
          document.getElementById("drop").dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true }));
        }""",
        list(PNG),
    )
    assert page.locator("#drop-text").inner_text() == "first.png"
    ask(page, "from a picture")
    page.locator(".clip", has_text="from a picture").wait_for()
    with serving.client as client:
        job = next(j for j in client.get("/v1/videos").json()["data"] if j["prompt"] == "from a picture")
    assert job["task"] == "i2va"


def test_the_cost_is_shown_before_it_is_paid(page: Any) -> None:
    page.fill("#prompt", "a lamp")
    assert page.locator("#cost-share").inner_text() == "the default clip"
    page.locator("#steps").fill("40")
    assert page.locator("#cost-share").inner_text() == "10 × the default clip"
    assert "40 steps twice, for guidance" in page.locator("#cost-why").inner_text()


def test_the_keyboard_alone_is_enough(page: Any) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.locator("#prompt").focus()
    page.keyboard.type("typed by hand")
    page.keyboard.press("Control+Enter")
    clip = page.locator(".clip", has_text="typed by hand")
    clip.wait_for()
    clip.locator(".open").focus()
    page.keyboard.press("Enter")
    page.locator("#viewer[open] video").wait_for()
    page.keyboard.press("Escape")
    clip.get_by_role("button", name="Delete").focus()
    page.keyboard.press("Enter")
    clip.wait_for(state="detached")


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_wide_and_narrow_in_light_and_dark(
    browser: Any, serving: Serving, tmp_path: Path, width: int, scheme: str
) -> None:
    with serving.client as client:
        job = client.post("/v1/videos", json={"prompt": "a lamp " + "long " * 40}).json()
    serving.until(job["id"], "completed")
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.goto(serving.url + "/")
    page.locator(".clip .frame img").first.wait_for()
    picture = artefact(page, f"{width}-{scheme}", tmp_path, full_page=width < 500)
    assert len(picture) > 10_000
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(246, 244, 241)", "dark": "rgb(18, 18, 21)"}[scheme]
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != ground
    context.close()


def test_the_api_page_shows_every_route_and_field(page: Any, serving: Serving, tmp_path: Path) -> None:
    page.goto(serving.url + "/docs")
    create = page.locator("details", has_text="Queue a clip").first
    create.locator("summary").click()
    assert "num_inference_steps" in create.inner_text()
    assert "1 to 200" in create.inner_text()
    text = page.locator("#routes").inner_text()
    for path in ("/v1/videos/{video_id}/content", "/v1/videos/{video_id}/events", "/v1/models", "/readyz"):
        assert path in text
    artefact(page, "docs", tmp_path)


def test_it_works_with_a_key_and_under_a_prefix(browser: Any, tmp_path: Path) -> None:
    flags = ("--api-key", "studio-secret", "--root-path", "/clips")
    with Serving(tmp_path / "state", *flags) as serving:
        context = browser.new_context()
        page = context.new_page()
        page.goto(serving.url + "/")
        page.locator("#ask[open]").wait_for()
        page.fill("#ask-key", "wrong-secret")
        page.keyboard.press("Enter")
        page.get_by_text("That key is not accepted").wait_for()
        page.fill("#ask-key", "studio-secret")
        page.keyboard.press("Enter")
        page.locator('#status[data-state="ready"]').wait_for()
        ask(page, "behind a prefix")
        page.locator(".clip .frame img").wait_for()
        context.close()
