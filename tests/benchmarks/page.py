"""Measure the web page in headless Chromium: how soon it is complete, how smooth it is, and how much memory it takes.

    python -m tests.benchmarks.page [--tokens 497] [--passes 100] [--threads 2] [--model bundled]

- **First view**: the time from the navigation until the first view is complete, with the bundled model, with an empty
  cache of the browser (median of several new contexts), and again with a full one.
- **Network** and **attention** (the grid of all heads): with SmolLM2-135M-Instruct (`--model` serves another one) and a
  prompt of `--tokens` tokens, the time from the navigation until the view is complete, and how much of it passes after
  the last pass of the service has ended.
- **Hovering** and **zooming**: frames a second while the pointer moves over the network or a large pattern, or its
  wheel turns there with Ctrl, and the longest frame.
- **Memory**: the JavaScript heap after `--passes` passes with different prompts, beside that after the first ten.
- **Largest answer**: the most bytes of one answer to the page, before and after compression.

It needs Playwright (`pip install '.[dev,web]'`) and Chromium. The browser and the service share the cores.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.benchmarks.serve import end_as_a_whole
from tests.published_models import smollm2
from tests.service.running import Running, running
from tests.web.browsing import chromium, new_context, open_view, url_of, wait_until_ready

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Response

ROUNDS = 5
SENTENCE = "When the captain of the ship looked at the dark sea, he thought of the long night before the storm. "
HOVER_SECONDS = 3.0
ZOOM_STEPS = 12  # turns of the wheel in one direction
WARM_PASSES = 10
# Counts frames until `stop` is called; returns the number of frames, the seconds, and the longest frame.
COUNT_FRAMES = """
(() => { const frames = window.frames_ = {times: [], running: true};
  const frame = (time) => { frames.times.push(time); if (frames.running) requestAnimationFrame(frame); };
  requestAnimationFrame(frame); })()
"""
READ_FRAMES = """
(() => { frames_.running = false; const times = frames_.times;
  const gaps = times.slice(1).map((time, index) => time - times[index]);
  return {frames: gaps.length, milliseconds: times.at(-1) - times[0], longest: Math.max(...gaps)}; })()
"""


class Answers:
    """The answers of the service to a page: the largest one, and the time of each pass."""

    def __init__(self, page: "Page") -> None:
        self.largest, self.largest_path, self.pass_ended = 0, "", 0.0
        page.on("response", self._note)

    def _note(self, response: "Response") -> None:
        path = response.url.split("/", 3)[3].split("?")[0]
        if path in ("patterns", "forward"):
            self.pass_ended = time.perf_counter()
        size = int(response.headers.get("content-length", "0"))
        if size > self.largest:
            self.largest, self.largest_path = size, path


@contextmanager
def new_page(browser: "Browser") -> "Iterator[Page]":
    with new_context(browser) as context:
        yield context.new_page()


def time_to_ready(page: "Page", url: str) -> float:
    began = time.perf_counter()
    page.goto(url, wait_until="commit")
    wait_until_ready(page)
    return time.perf_counter() - began


def measure_first_view(browser: "Browser", base: str) -> dict[str, float]:
    empty, full = [], []
    for _ in range(ROUNDS):
        with new_page(browser) as page:
            empty.append(time_to_ready(page, base))
            full.append(time_to_ready(page, base))
    return {"empty_cache_seconds": statistics.median(empty), "full_cache_seconds": statistics.median(full)}


def long_prompt(service: Running, num_tokens: int) -> str:
    """A text of about this many tokens, and never more."""
    text = SENTENCE * (num_tokens // 10)
    tokens = service.answer("/tokenize", text=text)["tokens"][:num_tokens]
    prompt: str = service.answer("/detokenize", tokens=[token["id"] for token in tokens])["text"]
    return prompt


def measure_view(browser: "Browser", service: Running, view: str, prompt: str) -> dict[str, Any]:
    """The time until a view is complete. Each round has another prompt, so that nothing is known before."""
    base, seconds, after = str(service.client.base_url), [], []
    largest, path = 0, ""
    for index in range(ROUNDS):
        with new_page(browser) as page:
            answers = Answers(page)
            seconds.append(time_to_ready(page, url_of(base, view, prompt=f"{index} {prompt}")))
            after.append(max(0.0, time.perf_counter() - answers.pass_ended) if answers.pass_ended else seconds[-1])
            if answers.largest > largest:
                largest, path = answers.largest, answers.largest_path
    return {
        "seconds": statistics.median(seconds),
        "after_the_pass_seconds": statistics.median(after),
        "largest_answer_bytes": largest,
        "largest_answer_path": path,
    }


def measure_frames(page: "Page", selector: str, *, zooms: bool) -> dict[str, float]:
    """Move the pointer over an element for some seconds, or zoom in and out, and count the frames that are drawn."""
    box = page.locator(selector).first.bounding_box()
    assert box is not None, f"nothing matches {selector}"
    page.evaluate(COUNT_FRAMES)
    if zooms:
        page.keyboard.down("Control")
    ends, step = time.perf_counter() + HOVER_SECONDS, 0
    while time.perf_counter() < ends:
        step += 1
        x = box["x"] + (step * 7) % max(1, int(box["width"]))
        y = box["y"] + (step * 3) % max(1, int(box["height"]))
        page.mouse.move(x, y)
        if zooms:
            page.mouse.wheel(0, 120 if step // ZOOM_STEPS % 2 else -120)
    if zooms:
        page.keyboard.up("Control")
    found = page.evaluate(READ_FRAMES)
    return {
        "frames_per_second": 1000 * found["frames"] / found["milliseconds"],
        "longest_frame_milliseconds": found["longest"],
        "moves": step,
    }


def heap_bytes(page: "Page") -> int:
    """The JavaScript heap after a collection."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    used = session.send("Runtime.getHeapUsage")["usedSize"]
    session.detach()
    return int(used)


def measure_memory(page: "Page", base: str, num_passes: int) -> dict[str, int]:
    """Pass after pass in one page, without leaving it."""
    open_view(page, base, "attention")
    heaps: list[int] = []
    for index in range(num_passes):
        page.get_by_label("Prompt").fill(f"{SENTENCE} {index}")
        page.get_by_label("Prompt").press("Enter")
        wait_until_ready(page)
        if index in (WARM_PASSES - 1, num_passes - 1):
            heaps.append(heap_bytes(page))
    return {"passes": num_passes, "heap_after_10_bytes": heaps[0], "heap_at_the_end_bytes": heaps[-1]}


def main() -> None:
    end_as_a_whole()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=497)
    parser.add_argument("--passes", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", help="a checkpoint directory; default: SmolLM2-135M-Instruct, which is downloaded")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with chromium() as browser:
        with running(model="bundled", threads=options.threads) as service:
            base = str(service.client.base_url)
            results["first_view"] = measure_first_view(browser, base)
            with new_page(browser) as page:
                results["memory"] = measure_memory(page, base, options.passes)
        with running(model=options.model or str(smollm2()), threads=options.threads) as service:
            prompt = long_prompt(service, options.tokens)
            for view in ("network", "attention"):
                results[view] = measure_view(browser, service, view, prompt)
                with new_page(browser) as page:
                    open_view(page, str(service.client.base_url), view, prompt=prompt)
                    results[f"{view}, hovering"] = measure_frames(page, f"{view}-view canvas", zooms=False)
                    if view == "network":
                        results[f"{view}, zooming"] = measure_frames(page, f"{view}-view canvas", zooms=True)
    for name, figures in results.items():
        print(name)  # noqa: T201
        for figure, value in figures.items():
            shown = f"{value:.3f}" if isinstance(value, float) else f"{value}"
            print(f"  {figure}: {shown}")  # noqa: T201
    print(json.dumps(results))  # noqa: T201


if __name__ == "__main__":
    main()
