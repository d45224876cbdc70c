"""The page in a real browser, with a real service that requires tokens."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from solrl_http.tokens import create_token
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tests.services.iteration_helpers import held_out, report, run_settings, samples, tell
from tests.services.reward_servers import serving
from tests.support.browser import Browser, Page
from tests.support.service_helpers import Layout, RunningService, adapter_file, running_service
from tests.support.small_model import small_model

LONG = "a" * 31 + "-" + "b" * 32
WAITING = "w" * 64
HOSTILE = """<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>"'`${hacked}\u202e""" + "x" * 300
TOLD = "!document.getElementById('main').hidden && document.querySelectorAll('#run tbody tr').length > 0"

UNFOLD = "document.querySelectorAll('#run details').forEach((one) => { one.open = true; })"

# Visible texts that do not fit into their box, or reach beyond the window.
CUT = """[...document.querySelectorAll('header *, .card *, .lead *, .values *, .choice *, '
  + '.tile, .tile *, #queue *, pre, .scroll, .times *')]
  .filter((one) => one.checkVisibility() && !one.closest('svg, .chart') && one.textContent.trim())
  .filter((one) => one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).display !== 'inline'
    || one.getBoundingClientRect().right > innerWidth)
  .map((one) => [one.tagName, one.className, one.textContent, one.clientWidth, one.scrollWidth])"""

# The lowest contrast of any text with its background, by WCAG 2.
CONTRAST = """(() => {
  const rgba = (text) => [...text.match(/[\\d.]+/g).map(Number), 1].slice(0, 4);
  const over = (top, under) => top.slice(0, 3).map((c, i) => c * top[3] + under[i] * (1 - top[3]));
  const linear = (c) => (c /= 255) <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
  const light = (rgb) => .2126 * linear(rgb[0]) + .7152 * linear(rgb[1]) + .0722 * linear(rgb[2]);
  const behind = (node) => node
    ? over(rgba(getComputedStyle(node).backgroundColor), behind(node.parentElement)) : [255, 255, 255];
  const found = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !node.checkVisibility()) continue;
    const under = behind(node), ink = over(rgba(getComputedStyle(node).color), under);
    const [low, high] = [light(under), light(ink)].sort((a, b) => a - b);
    found.push([(high + .05) / (low + .05), walk.currentNode.data]);
  }
  return {count: found.length, least: found.sort((a, b) => a[0] - b[0])[0]};
})()"""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("tokens") / "tokens.json"
    return {"file": file} | {who: create_token(file, who, ("push", "rollout"), None)[0] for who in ("ann", "bob")}


@pytest.fixture(scope="module")
def guarded(tokens: dict[str, Any], layout: Layout) -> Iterator[RunningService]:
    """Ann has a run `shapes` with two versions, one with a long name and hostile texts, one that waits; Bob has one."""
    with running_service("--token-file", str(tokens["file"]), model=small_model()) as running:
        for who, run in (("bob", "bobs-run"), ("ann", LONG), ("ann", "shapes")):
            running.client.headers["Authorization"] = f"Bearer {tokens[who]}"
            assert running.push(run, 0, adapter_file(layout, 1)).status_code == 201
            hostile = run == LONG
            rewards = {HOSTILE[:90]: {"mean": 1, "best": 2, "worst": 0}, "hpsv2": {"mean": 1, "best": 2, "worst": 0}}
            more: dict[str, Any] = {"rewards": rewards, "seconds": {HOSTILE[:128]: 2.0}} if hostile else {}
            if hostile:
                place = {"reward": HOSTILE[:128], "server": "s" * 250, "seconds": 2e6}
                more["scoring"] = [{"of": "candidates", "by": "service", **place}]
            for i in range(3):
                shown = run_settings(**{"lora.rank": 8 if run == "shapes" else HOSTILE[:200]})
                more["settings"] = shown if i == 0 and who == "ann" else None
                more["held_out"] = [
                    held_out(v, 0.4 + v / 10, HOSTILE[:90] if hostile else "clipscore") for v in ((0, 1), (), (3,))[i]
                ]
                more["spearman"] = 0.9 if i == 0 and run == "shapes" else None
                told = report(i, 0.5 + i / 50, samples=samples(i, HOSTILE if hostile else "a red circle"), **more)
                assert tell(running, run, told).status_code == 204
        assert running.push(WAITING, 0, adapter_file(layout, 1)).status_code == 201
        assert running.push("shapes", 1, adapter_file(layout, 2), parent=0).status_code == 201
        yield running


@pytest.fixture
def enter(guarded: RunningService, tokens: dict[str, Any]) -> Callable[..., None]:
    """Open the page with a tenant's token, and wait for its content."""

    def enter(page: Page, who: str = "ann", at: str = "", url: str = f"{guarded.url}/") -> None:
        key = f"sessionStorage.setItem('solrl-token', '{tokens[who]}')"
        page.call("Page.addScriptToEvaluateOnNewDocument", source=f"if (location.protocol === 'http:') {key}")
        page.open(f"{url}#{at}")
        page.wait(TOLD)

    return enter


def test_a_stranger_is_asked_for_a_token(browser: Browser, guarded: RunningService, tokens: dict[str, Any]) -> None:
    def give(token: str) -> None:
        page.wait("!document.getElementById('door').hidden")
        page.see(f"document.getElementById('token').value = '{token}'; document.querySelector('#door button').click()")

    with browser.page() as page:
        page.open(guarded.url)
        page.wait("!document.getElementById('door').hidden")
        assert "shapes" not in page.text()
        give("solrl_guessed")
        page.wait("document.getElementById('fault').textContent.includes('is unknown')")
        give(tokens["ann"])
        page.wait(TOLD)
        assert "shapes" in page.text()
        assert page.see("JSON.stringify(localStorage) + document.cookie + location.href").count("solrl_") == 0
        page.reload()
        page.wait(TOLD)
        page.see("document.getElementById('leave').click()")
        page.wait("!document.getElementById('door').hidden")
        assert page.see("sessionStorage.length") == 0
        assert "shapes" not in page.text()
        assert page.faults() == []


def test_the_page_shows_the_tenants_runs(browser: Browser, enter: Callable[..., None], guarded: RunningService) -> None:
    with browser.page() as page:
        enter(page, at="run=shapes")
        lead = page.see("document.querySelector('#run .lead').innerText")
        assert "Held out: clipscore" in lead
        assert "128 images; the same prompts and seeds" in lead
        strict = page.see("document.querySelector('.held-out .small-charts h3').innerText")
        assert strict == "strict accuracy (verifier): 50.0 %"
        folded = page.text()
        order = (
            "trains on clipscore + 0.5 × hpsv2",
            "Held out: clipscore",
            "Training: clipscore + 0.5 × hpsv2",
            "Settings\n",
        )
        places = [folded.index(part) for part in (*order, "Adapter lineage: 2 versions")]
        assert places == sorted(places)
        assert "Parent" not in folded
        assert page.see("document.getElementById('all').offsetTop < document.getElementById('run').offsetTop")
        page.see(UNFOLD)
        said = page.text()
        info = guarded.client.get("/v1/runs/shapes/adapters/1").json()
        for part in ("shapes", "iteration 3 of 10", "v1head", info["digest"][7:19], "NVFP4 (emulated)"):
            assert part in said.replace("\t", "").replace("\n", ""), part
        for part in ("Best and worst of iteration 3", "Rank fidelity (Spearman)", "Parent"):
            assert part in said
        rewards = page.see("document.querySelector('#run .rewards').innerText").split("\n")
        assert [text for text in rewards if text] == [
            *("clipscore", "candidates, in the service", "0.4 s"),
            *("vlm_judge", "candidates, at judges.example:8200, for the service", "12 s"),
            *("clipscore", "samples, in the trainer", "0.1 s"),
        ]
        assert page.wait("[...document.images].length === 4 && [...document.images].every((one) => one.naturalWidth)")
        assert page.wait("document.querySelectorAll('#run .chart canvas').length >= 5")
        assert page.see("document.querySelectorAll('.card').length") == 3
        page.see(f"document.querySelector('.card[href$={LONG}]').click()")
        page.wait(f"document.querySelector('#run h2').textContent === '{LONG}'")
        assert "Rank fidelity" not in page.text()
        asked = [one["request"]["url"] for one in page.happened("Network.requestWillBeSent")]
        assert any("/v1/status" in url for url in asked)
        assert [url for url in asked if not url.startswith((f"{guarded.url}/", "data:image/"))] == []
        assert page.faults() == []
        # The policy also applies to injected scripts.
        page.see("fetch('https://example.org/').catch(() => {})")
        assert any("Content Security Policy" in fault for fault in page.faults())


@pytest.mark.parametrize(("places", "ends"), [([0], [0, 1]), ([7], [7, 8]), ([0, 8], [0, 8])])
def test_axes_end_with_values(browser: Browser, guarded: RunningService, places: list[int], ends: list[int]) -> None:
    with browser.page() as page:
        page.open(guarded.url)
        page.see(
            "document.body.append(window.box = el('div', {className: 'chart axes'})); "
            f"draw(box, {{axes: true, label: '', xs: {places}, "
            f"lines: [{{name: 'mean', values: {places}.map(() => 0.5)}}]}})"
        )
        page.wait("box.chart")
        assert page.see("[box.chart.scales.x.min, box.chart.scales.x.max]") == ends


def test_the_page_follows_new_reports(browser: Browser, enter: Callable[..., None], guarded: RunningService) -> None:
    with browser.page() as page:
        enter(page, at="run=shapes")
        page.see("window.same = true")
        newer = report(3, 0.8765, samples=samples(3), held_out=[held_out(4, 0.7654)])
        drawing = "document.querySelector('#run .chart canvas')?.toDataURL()"
        page.wait(drawing)
        before = page.see(drawing)
        assert tell(guarded, "shapes", newer).status_code == 204
        page.wait("document.body.innerText.includes('iteration 4 of 10')")
        page.wait("document.body.innerText.includes('Best and worst of iteration 4')")
        assert "0.7654" in page.see("document.querySelector('.card[aria-current=true]').innerText")
        assert "0.7654" in page.see("document.querySelector('#run .lead .value').innerText")
        page.wait(f"{drawing} && {drawing} !== '{before}'")
        ended = newer.model_copy(update={"ended": "no new best in 3 iterations"})
        assert tell(guarded, "shapes", ended).status_code == 204
        page.wait("document.querySelector('#run .head').innerText.includes('ended early')")
        assert "no new best in 3 iterations" in page.see("document.querySelector('#run .head').innerText")
        assert "ended early" in page.see("document.querySelector('.card[aria-current=true]').innerText")
        assert page.see(CUT) == []
        assert page.see("window.same")
        page.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
        page.wait("document.getElementById('state').textContent.startsWith('no answer')")
        page.call(
            "Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )
        page.wait("document.getElementById('state').textContent === 'live'")


@pytest.mark.parametrize("width", [320, 1280])
def test_runs_are_compared(browser: Browser, enter: Callable[..., None], width: int) -> None:
    with browser.page(width, 3000) as page:
        enter(page, at="run=shapes")
        page.see("location.hash = 'compare'")
        page.wait("document.querySelectorAll('#compare .over canvas').length >= 4")
        first = "document.querySelector('#compare .over').innerText"
        assert "strict accuracy (verifier), %" in page.see(first)
        curve = "document.querySelector('#compare .over').children[1].querySelector('.chart')"
        assert page.see(f"{curve}.ariaLabel") == f"strict accuracy (verifier), %, shapes, {LONG}"
        assert page.see(f"{curve}.chart.data.slice(1).length") == 2
        differ = page.see("document.querySelector('#compare .differ').innerText")
        assert "lora.rank" in differ
        assert "+0.0 points [" in page.see("document.querySelector('#compare table').innerText")
        assert "explore.prompts" not in differ
        page.see(
            "[...document.querySelectorAll('#compare button')].find((e) => e.innerText === 'by candidates').click()"
        )
        page.wait(f"{curve}?.chart?.scales.x.max > 1000")
        assert page.see("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
        assert page.see(CUT) == []
        page.see("[...document.querySelectorAll('.choice button')].find((one) => one.innerText === 'shapes').click()")
        page.wait(f"{curve}?.chart?.data.slice(1).length === 1")
        assert page.faults() == []


def test_a_run_that_is_deleted_and_pushed_again_has_no_curve(
    browser: Browser, enter: Callable[..., None], guarded: RunningService, layout: Layout
) -> None:
    drawn = "document.querySelectorAll('.card[href$=again] canvas').length"
    try:
        guarded.push("again", 0, adapter_file(layout, 1))
        for i in range(2):
            tell(guarded, "again", report(i, held_out=[held_out(i + 1, 0.5)]))
        with browser.page() as page:
            enter(page, at="run=shapes")
            page.wait(f"{drawn} > 0")
            guarded.client.delete("/v1/runs/again")
            guarded.push("again", 0, adapter_file(layout, 2))
            page.wait(f"document.querySelector('.card[href$=again]')?.innerText.includes('waiting') && {drawn} === 0")
            assert page.see("document.querySelector('.card[href$=again] .value').textContent") == "–"
            assert page.faults() == []
    finally:
        guarded.client.delete("/v1/runs/again")


@pytest.mark.parametrize("width", [320, 768])
def test_users_texts_are_text_and_scroll_none_sideways(
    browser: Browser, enter: Callable[..., None], width: int
) -> None:
    with browser.page(width) as page:
        enter(page, at=f"run={LONG}")
        page.wait("document.querySelectorAll('#run figure').length === 2")
        assert HOSTILE[:60] in page.see("document.querySelector('figcaption').textContent")
        assert page.see("document.querySelector('#run').innerText.split('<script>').length") >= 3
        counts = page.see("[typeof window.hacked, document.scripts.length, document.images.length]")
        assert counts == ["undefined", 1, 4]
        assert page.see("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
        small = page.see(
            "Math.min(...[...document.querySelectorAll('body *')].map((e) => parseFloat(getComputedStyle(e).fontSize)))"
        )
        assert small >= 12
        assert page.faults() == []


def test_other_tenants_runs_are_hidden_and_gains_have_intervals(browser: Browser, enter: Callable[..., None]) -> None:
    with browser.page() as page:
        enter(page, "bob", at="run=shapes")
        said = page.text()
        assert "bobs-run" in said
        assert "tenant bob" in said
        assert "shapes" not in said
        assert LONG not in said
        assert "bobs-run" not in json.dumps([one["documentURL"] for one in page.happened("Network.requestWillBeSent")])
        lead = page.see("document.querySelector('#run .lead').innerText")
        assert "0.7000\n+0.3000 [+0.2500, +0.3500]" in lead.replace("\n\n", "\n")
        assert page.see("document.querySelector('.lead .gain').className") == "gain on"


@pytest.fixture(scope="module")
def prefixed(guarded: RunningService) -> Iterator[str]:
    """Address of a proxy that offers the service as `/shared/solrl`, and nothing else."""

    def answer(request: Request) -> Response:
        path = f"/{request.path_params['path'].removeprefix('/')}"
        found = httpx.get(guarded.url + path, params=request.url.query, headers=request.headers)
        kept = {"content-type", "content-security-policy"} & found.headers.keys()
        return Response(found.content, found.status_code, {name: found.headers[name] for name in kept})

    with serving(Starlette(routes=[Route("/shared/solrl{path:path}", answer)])) as address:
        yield f"{address}/shared/solrl"


@pytest.mark.parametrize("end", ["/", ""])
def test_the_page_works_under_a_prefix(
    browser: Browser, enter: Callable[..., None], guarded: RunningService, prefixed: str, end: str
) -> None:
    with browser.page() as page:
        enter(page, at="run=shapes", url=prefixed + end)
        assert "shapes" in page.text()
        asked = [one["request"]["url"] for one in page.happened("Network.requestWillBeSent")]
        assert any(url.startswith(f"{prefixed}/v1/runs/shapes/adapters") for url in asked)
        assert page.see("document.getElementById('command').textContent").endswith(f" --rollout-url {prefixed}")
        assert page.faults() == []


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("run", ["shapes", LONG, WAITING])
def test_nothing_is_cut(browser: Browser, enter: Callable[..., None], run: str, width: int) -> None:
    with browser.page(width, 6000) as page:
        enter(page, at=f"run={run}")
        page.wait(f"document.querySelector('#run h2').textContent === '{run}'")
        assert "waiting for its first iteration" in page.text()
        assert page.see(CUT) == []
        page.see("document.getElementById('state').textContent = 'an answer that explains at length '.repeat(9)")
        assert page.see(CUT) == []


def test_the_first_command_is_not_cut_on_a_phone(browser: Browser) -> None:
    with running_service() as service, browser.page(360) as page:
        page.open(service.url)
        page.wait("!document.getElementById('none').hidden")
        assert "--rollout-url" in page.text()
        assert page.see(CUT) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(browser: Browser, enter: Callable[..., None], scheme: str, tmp_path: Path) -> None:
    paper = "parseInt(getComputedStyle(document.body).backgroundColor.slice(4)) > 128"
    with browser.page(scheme=scheme) as page:
        enter(page, at="run=shapes")
        assert page.see(paper) == (scheme == "light")
        seen = page.see(CONTRAST)
        assert seen["count"] > 60
        assert seen["least"][0] >= 4.5, seen["least"]
        other = "dark" if scheme == "light" else "light"
        page.see("document.getElementById('theme').click()")
        if other == "dark":
            page.see("document.getElementById('theme').click()")
        assert page.see("document.documentElement.dataset.theme") == other
        assert page.see(paper) == (other == "light")
        assert page.see(CONTRAST)["least"][0] >= 4.5
        page.reload()
        page.wait(TOLD)
        assert page.see(paper) == (other == "light")
