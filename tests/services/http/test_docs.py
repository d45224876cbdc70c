"""The API's documentation in a real browser."""

import gzip
from importlib.resources import files

import pytest
from tests.support.browser import Browser
from tests.support.service_helpers import RunningService


def test_the_documentation_shows_the_operations_without_the_internet_or_other_scripts(
    browser: Browser, service: RunningService
) -> None:
    policy = service.client.get("/docs").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy.partition("script-src")[2].partition(";")[0]
    for other in ("/docs/static/redoc.standalone.js", "/redoc"):
        assert service.client.get(other).status_code == 404
    with browser.page() as page:
        page.open(f"{service.url}/docs")
        page.wait("document.querySelectorAll('.opblock').length > 10")
        shown = page.text()
        for path in ("/v1/rollouts", "/v1/models", "/health/live"):
            assert path in shown.replace("\u200b", ""), path
        asked = [one["request"]["url"] for one in page.happened("Network.requestWillBeSent")]
        assert any("swagger-ui-bundle.js" in url for url in asked)
        assert [url for url in asked if not url.startswith((f"{service.url}/", "data:"))] == []
        assert page.faults() == []
        page.see("document.body.append(Object.assign(document.createElement('script'), {text: 'window.hacked = 1'}))")
        page.see("fetch('https://example.org/').catch(() => {})")
        assert page.see("typeof window.hacked") == "undefined"
        assert len([fault for fault in page.faults() if "Content Security Policy" in fault]) >= 2


@pytest.mark.parametrize("name", ["swagger-ui-bundle.js", "swagger-ui.css"])
@pytest.mark.parametrize(("accepted", "packed"), [("br, gzip", True), ("identity", False)])
def test_files_are_compressed_where_accepted(service: RunningService, name: str, accepted: str, packed: bool) -> None:
    url, content = f"/docs/static/{name}", (files("fastapi_offline") / "static" / name).read_bytes()
    with service.client.stream("GET", url, headers={"Accept-Encoding": accepted}) as answer:
        raw = b"".join(answer.iter_raw())
    assert (answer.headers.get("content-encoding") == "gzip", answer.headers["vary"]) == (packed, "Accept-Encoding")
    assert (gzip.decompress(raw) if packed else raw) == content
    assert int(answer.headers["content-length"]) == len(raw)
    assert not packed or len(raw) < len(content) / 2
