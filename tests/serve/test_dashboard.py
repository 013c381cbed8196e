"""The dashboard: its data, access to it, and the page in a browser."""

from __future__ import annotations

import re
import shutil
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from serving import PATIENCE, RunningServer, running, wait_until
from test_behaviour import ENDLESS, SHORT, HeldLLM, metrics, post

from spmoe import AsyncLLM
from spmoe.observe.expert_uses import ExpertUses

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

TOKENS = {"prompt": "x = 1", "max_tokens": 20, "ignore_eos": True}


class FakeClock:
    """A clock that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def data(server: RunningServer, **options: Any) -> dict[str, Any]:
    """Return what the page polls."""
    answer = httpx.get(f"{server.url}/dashboard/data", timeout=PATIENCE, **options)
    assert answer.status_code == 200
    assert answer.headers["Cache-Control"] == "no-store"
    found: dict[str, Any] = answer.json()
    return found


@contextmanager
def endless_stream(server: RunningServer) -> Iterator[str]:
    """Run a request until the block ends; yield its id."""
    url, body = f"{server.url}/v1/completions", {**ENDLESS, "stream": True}
    with httpx.stream("POST", url, json=body, timeout=PATIENCE) as stream:
        lines = stream.iter_lines()  # dropping it closes the connection
        yield re.findall(r'"id":"([^"]+)"', next(lines))[0]
    wait_until(server.idle)


# ---- data


def test_data_without_requests(llm: AsyncLLM) -> None:
    with running(llm) as server:
        found = data(server)
        assert found["model"] == "spmoe-pair"
        assert found["failure"] is None
        assert found["tokens_per_second"] is None  # there is nothing to compare with
        for name in ("ttft_seconds", "tpot_seconds", "link_utilisation"):
            assert found[name] is None
        assert found["hit_rate"]["recent"] is found["acceptance"]["recent"] is found["draft_tokens"]["recent"] is None
        assert (found["running"], found["waiting"], found["requests"]) == (0, 0, [])
        rows = [b64decode(row) for row in found["experts"]]
        assert tuple(map(len, rows)) == llm.llm.engine.spec.experts
        assert sum(value >= 128 for row in rows for value in row) == found["slots"]["used"] <= found["slots"]["total"]
        assert all(value % 128 == 0 for row in rows for value in row)  # none was used lately
        server.service.draining.set()
        assert "shutting down" in data(server)["failure"]


def test_rates_are_differences_of_counters(llm: AsyncLLM) -> None:
    from spmoe.serve.dashboard import Dashboard

    engine, clock = llm.llm.engine, FakeClock()
    with running(llm) as server:
        dashboard = Dashboard(server.service, clock)
        dashboard.data()
        before = engine.counters
        post(server, TOKENS)
        clock.now += 2
        found, counters = dashboard.data(), engine.counters.minus(before)
        assert found["window_seconds"] == 2
        assert found["tokens_per_second"] == 10
        assert found["hit_rate"]["recent"] == counters.hit_rate
        assert found["acceptance"]["recent"] == counters.accepted / counters.drafted
        assert found["draft_tokens"]["recent"] == counters.drafted / counters.verified == 2
        assert found["link_utilisation"] == engine.loop.rates.busy
        used = [[value % 128 for value in b64decode(row)] for row in found["experts"]]
        assert all(1 <= max(row) <= 127 for row in used)
        clock.now += 100  # nobody has looked for so long that there are no live rates
        found = dashboard.data()
        assert found["tokens_per_second"] is found["hit_rate"]["recent"] is found["link_utilisation"] is None
        assert not any(value % 128 for row in found["experts"] for value in b64decode(row))
        clock.now += 1
        assert dashboard.data()["tokens_per_second"] == 0


def test_pages_do_not_disturb_each_other(llm: AsyncLLM) -> None:
    from spmoe.serve.dashboard import WINDOW_SECONDS, Dashboard

    clock = FakeClock()
    with running(llm) as server:
        dashboard = Dashboard(server.service, clock)
        dashboard.data()
        post(server, TOKENS)
        for _ in range(20):  # another page polls ten times a second
            clock.now += 0.1
            dashboard.data()
        found = dashboard.data()
        assert found["tokens_per_second"] == pytest.approx(20 / found["window_seconds"])
        assert found["window_seconds"] == pytest.approx(2.0, abs=0.5)
        for _ in range(200):
            clock.now += 0.1
            window = dashboard.data()["window_seconds"]
        assert window == pytest.approx(WINDOW_SECONDS, abs=1.0)
        for _ in range(3):  # a client that polls less often than once in the window
            clock.now += 12
            assert dashboard.data()["window_seconds"] == pytest.approx(12, abs=1.0)


def test_data_agrees_with_metrics(llm: AsyncLLM) -> None:
    with running(llm) as server:
        post(server, TOKENS)
        wait_until(server.idle)
        found, samples = data(server), metrics(server)

    def sample(name: str) -> float:
        return samples[f'{name}{{model_name="spmoe-pair"}}']

    hits, late, demand = (sample(f"spmoe_expert_{name}_total") for name in ("hits", "late", "demand_loads"))
    drafted = sample("vllm:spec_decode_num_draft_tokens_total")
    totals = {"generated_tokens": sample("vllm:generation_tokens_total"), "steps": sample("spmoe_steps_total")}
    assert found["totals"] == {**totals, "routed_experts": hits + late + demand}
    assert found["totals"]["generated_tokens"] == 20
    assert found["hit_rate"]["total"] == pytest.approx(hits / (hits + late + demand))
    assert found["acceptance"]["total"] == pytest.approx(sample("vllm:spec_decode_num_accepted_tokens_total") / drafted)
    assert found["draft_tokens"]["total"] == pytest.approx(sample("spmoe_draft_tokens_mean"))
    slots = {"used": sample("spmoe_expert_slots_in_use"), "total": sample("spmoe_expert_slots")}
    assert found["slots"] == slots
    assert found["cutoff_layers"] == samples.get('spmoe_cutoff_layers{model_name="spmoe-pair"}')
    assert found["kv_usage"] == samples.get('vllm:kv_cache_usage_perc{model_name="spmoe-pair"}')
    assert found["ttft_seconds"] == pytest.approx(sample("vllm:time_to_first_token_seconds_sum"))  # of one request
    assert 0 < found["tpot_seconds"] <= sample("vllm:inter_token_latency_seconds_sum")


def test_running_and_waiting_requests(llm: AsyncLLM) -> None:
    with running(llm) as server:
        with endless_stream(server) as request_id:
            found = data(server)
            (request,) = found["requests"]
            assert (found["running"], found["waiting"]) == (1, 0)
            assert request["id"] == f"{request_id}-0"
            assert request["running"]
            assert request["prompt_tokens"] == len(llm.llm.get_tokenizer()(ENDLESS["prompt"])["input_ids"])
            assert 0 <= request["cached_tokens"] < request["prompt_tokens"]
            assert request["age_seconds"] > 0
            seen = request["output_tokens"]
            assert seen > 0
            wait_until(lambda: data(server)["requests"][0]["output_tokens"] > seen)
        assert data(server)["requests"] == []
    held = HeldLLM(llm)
    with running(held) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, server, {**SHORT, "n": 2, "temperature": 1})
        wait_until(lambda: data(server)["waiting"] == 2)
        for request in data(server)["requests"]:
            assert not request["running"]
            assert (request["cached_tokens"], request["output_tokens"]) == (None, 0)
        held.held = False
        assert answer.result().status_code == 200
        assert data(server)["requests"] == []


def test_bytes_of_experts() -> None:
    from spmoe.serve.dashboard import expert_rows, use_shares

    uses = ExpertUses(2, 3)
    before = uses.snapshot()
    for number in range(200):
        uses.add(0, [0] if number else [0, 2])
    after = uses.snapshot()
    assert before.uses.sum() == 0
    shares = use_shares(before, after)
    assert shares.tolist() == [[1, 0, 1 / 200], [0, 0, 0]]
    present = np.array([[True, False, False], [False, True, False]])
    rows = [list(b64decode(row)) for row in expert_rows((3, 2), present, shares)]
    assert rows == [[255, 0, 1], [0, 128]]
    assert not use_shares(after, uses.snapshot()).any()


# ---- access


def test_data_needs_the_key(llm: AsyncLLM) -> None:
    with running(llm, api_keys=("secret",)) as server:
        url = f"{server.url}/dashboard/data"
        for headers in ({}, {"Authorization": "Bearer other"}):
            answer = httpx.get(url, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert data(server, headers={"Authorization": "Bearer secret"})["model"] == "spmoe-pair"
        page = httpx.get(f"{server.url}/dashboard")
        assert page.status_code == 200
        assert "secret" not in page.text


def test_page_allows_its_own_script_only(server: RunningServer) -> None:
    answer = httpx.get(f"{server.url}/dashboard")
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    directives = dict(part.split(" ", 1) for part in answer.headers["Content-Security-Policy"].split("; "))
    assert directives["default-src"] == "'none'"
    assert directives["frame-ancestors"] == directives["base-uri"] == directives["form-action"] == "'none'"
    assert directives["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        assert directives[f"{tag}-src"] == f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"
    addresses = set(re.findall(r"\w+://[^\"'\s]+", answer.text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, which nothing is loaded from
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", answer.text)


# ---- in a browser

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
COLOURS = """() => {
    const map = document.getElementById("map");
    const pixels = map.getContext("2d").getImageData(0, 0, map.width, map.height).data;
    return new Set(new Uint32Array(pixels.buffer)).size;
}"""


@pytest.fixture(scope="module")
def open_page() -> Iterator[Callable[..., Any]]:
    """A function that opens a page in Chromium; its `messages` are errors and warnings of the browser."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("needs chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=FLAGS)

        def open_page(url: str, **options: Any) -> Any:
            page = browser.new_context(**options).new_page()
            page.set_default_timeout(1000 * PATIENCE)
            page.messages = []
            page.on("console", lambda message: page.messages.append(message.text))
            page.on("pageerror", lambda error: page.messages.append(str(error)))
            page.goto(url)
            return page

        yield open_page
        browser.close()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_page_shows_figures(server: RunningServer, open_page: Callable[..., Any], width: int, scheme: str) -> None:
    page = open_page(f"{server.url}/dashboard", viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.get_by_text("Live.").wait_for()
    page.get_by_role("cell", name="none").wait_for()
    idle = page.locator("#figures").bounding_box()
    with endless_stream(server):
        page.get_by_role("cell", name="running").wait_for()
        page.wait_for_function("() => parseFloat(document.querySelector('.figure .value').textContent) > 0")
        page.wait_for_function(f"() => ({COLOURS})() > 3")
        page.wait_for_function("() => document.querySelector('.figure path').getAttribute('d').includes('L')")
        assert page.locator("#figures").bounding_box() == idle  # nothing has moved
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.locator("#map").focus()
    page.keyboard.press("ArrowDown")
    assert page.locator("#readout").text_content().startswith("Layer 0, expert 0: ")
    page.locator("#map").hover(position={"x": 2, "y": 20})
    assert page.locator("#readout").text_content().startswith("Layer 1, expert 0: ")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
    assert page.messages == []


def test_page_asks_for_the_key(llm: AsyncLLM, open_page: Callable[..., Any]) -> None:
    with running(llm, api_keys=("secret",)) as server:
        page = open_page(f"{server.url}/dashboard")
        for key, text in [("wrong", "The API key is wrong"), ("secret", "Live.")]:
            page.get_by_label("API key").fill(key)
            page.get_by_role("button").click()
            page.get_by_text(text).wait_for()
        page.reload()
        page.get_by_text("Live.").wait_for()
        assert not page.get_by_label("API key").is_visible()
        assert all("401" in message for message in page.messages)


def test_page_says_that_the_server_is_gone(llm: AsyncLLM, open_page: Callable[..., Any]) -> None:
    with running(llm) as server:
        page = open_page(f"{server.url}/dashboard")
        page.get_by_text("Live.").wait_for()
    page.get_by_text("The server does not answer. Figures are from").wait_for()
