"""The status shows reports of runs to their tenant, in few bytes."""

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest
from solrl_proto.status import Point, RunDetail, StatusAnswer
from solrl_rollout.status.curves import MOST_POINTS
from tests.services.iteration_helpers import held_out, huge_png, report, run_settings, samples, tell, thumbnail
from tests.support.service_helpers import MODEL, Layout, RunningService, adapter_file, problem


@pytest.fixture
def run(service: RunningService, layout: Layout, request: pytest.FixtureRequest) -> Iterator[str]:
    """A run with one adapter, deleted after the test."""
    name = f"status-{abs(hash(request.node.name)) % 10**8}"
    assert service.push(name, 0, adapter_file(layout, 1)).status_code == 201
    yield name
    service.client.delete(f"/v1/runs/{name}")


def status(service: RunningService, since: int = 0) -> StatusAnswer:
    return StatusAnswer.model_validate_json(service.client.get("/v1/status", params={"since": since}).content)


def test_reports_are_shown_and_a_curve_is_sent_once(service: RunningService, run: str) -> None:
    def shown(seen: StatusAnswer) -> Any:
        return next(one for one in seen.runs if one.run == run)

    before = shown(status(service))
    assert (before.revision, before.last, before.curve, before.head, before.versions) == (None, None, None, 0, 1)
    for i in range(3):
        assert tell(service, run, report(i, 0.5 + i / 10, samples=samples(i))).status_code == 204
    seen = status(service)
    found = shown(seen)
    assert found.last == Point.model_validate(report(2, 0.7).model_dump(exclude={"samples"}))
    assert found.curve.series["mean"] == (0.5, 0.6, 0.7)
    assert found.age is not None
    detail = RunDetail.model_validate_json(service.client.get(f"/v1/runs/{run}/iterations").content)
    assert detail.samples == samples(2)
    assert detail.curve.series["reward:clipscore"] == (0.5, 0.6, 0.7)
    assert (seen.service.tenant, seen.service.store, seen.service.models[0].name) == ("local", "memory", MODEL)
    assert (seen.queue.candidates, seen.queue.limit) == (0, 4096)
    again = shown(status(service, seen.revision))
    assert (again.curve, again.last is not None) == (None, True)
    tell(service, run, report(3))
    assert shown(status(service, seen.revision)).curve.iterations == (0, 1, 2, 3)


@pytest.mark.parametrize("path", ["/v1/status?sinse=3", "/v1/models?x=1&x=2", "/v1/runs?=1"])
def test_an_unknown_query_parameter_is_refused(service: RunningService, path: str) -> None:
    answer = service.client.get(path)
    found = problem(answer)
    assert (answer.status_code, found["kind"]) == (422, "unknown-parameter")
    assert found["expected"] == (["since"] if "status" in path else "none")


def test_long_curves_are_thinned_and_compressed(service: RunningService, run: str) -> None:
    for i in range(MOST_POINTS + 30):
        more = {"held_out": [held_out(i + 1, 0.5)]} | ({} if i else {"settings": run_settings()})
        tell(service, run, report(i, i / 100, **more))
    with service.client.stream("GET", "/v1/status", headers={"Accept-Encoding": "gzip"}) as answer:
        packed = b"".join(answer.iter_raw())
        assert (answer.headers["content-encoding"], answer.headers["cache-control"]) == ("gzip", "no-store")
    whole = service.client.get("/v1/status", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in whole.headers
    assert len(packed) < len(whole.content) / 2
    (shown,) = [one for one in json.loads(gzip.decompress(packed))["runs"] if one["run"] == run]
    assert len(shown["curve"]["iterations"]) == MOST_POINTS
    path = f"/v1/runs/{run}/iterations"
    thin = service.client.get(path).json()
    assert len(thin["curve"]["iterations"]) == len(thin["held_out"]) == MOST_POINTS
    assert thin["curve"]["series"]["elapsed"][-1] == pytest.approx((MOST_POINTS + 30) * 4.6)
    assert thin["settings"] == run_settings()


def test_candidates_are_counted(service: RunningService) -> None:
    service.rollout(count=48)
    seen = status(service).throughput
    assert seen.candidates_per_second > 0
    assert seen.step_seconds
    assert sum(seen.history) > 0


HEADS = (thumbnail(side=129), thumbnail(side=129, kind="PNG"), huge_png(), thumbnail(kind="GIF"))


@pytest.mark.parametrize(
    "image", [*HEADS, "AAAA", "A", thumbnail()[:40], thumbnail(kind="PNG")[:16]], ids=range(len(HEADS) + 4)
)
def test_an_invalid_thumbnail_is_refused(service: RunningService, run: str, image: str) -> None:
    told: dict[str, Any] = report(0, samples=samples(0)).model_dump(mode="json")
    told["samples"]["pairs"][1]["regenerated"] = image
    found = problem(service.client.post(f"/v1/runs/{run}/iterations", json=told))
    assert (found["status"], found["kind"]) == (422, "invalid-request")
    assert found["where"] == "body.samples.pairs.1.regenerated"
    assert service.client.get(f"/v1/runs/{run}/iterations").json()["curve"]["iterations"] == []


@pytest.mark.parametrize(
    "wrong",
    [{"loss": "NaN"}, {"loss": 1e300}, {"iteration": -1}, {"more": 1}, {"seconds": {"train": -1}}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_an_invalid_iteration_is_refused(service: RunningService, run: str, wrong: dict[str, Any]) -> None:
    refused = service.client.post(f"/v1/runs/{run}/iterations", json=report(0).model_dump(mode="json") | wrong)
    assert (refused.status_code, problem(refused)["kind"]) == (422, "invalid-request")


def test_the_page_is_one_file_under_a_strict_policy(service: RunningService) -> None:
    page = service.client.get("/", headers={"Accept-Encoding": "gzip"})
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert all(policy[k].startswith("'sha256-") and "unsafe" not in policy[k] for k in ("script-src", "style-src"))
    assert int(page.headers["content-length"]) < 50_000
    text = page.text.replace("http://www.w3.org/2000/svg", "")
    text = text.replace("https://github.com/leeoniya/uPlot", "")  # in its licence's comment
    assert not [word for word in ("http://", "https://", "/*style*/", "innerHTML") if word in text]
    again = service.client.get("/", headers={"If-None-Match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
