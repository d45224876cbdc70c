"""The smaller miniature, with a copy of its transformer for each test that trains it, and a service of it."""

import copy
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from solrl_core.families import Backbone, load_backbone
from solrl_core.families.load import locate
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.rewards import clipscore
from solrl_core.rewards.loading import pretrained
from solrl_trainer.records.shown_log import shown_log
from solrl_trainer.report import charts
from solrl_trainer.rollouts import loading
from tests.core.lora_helpers import own_copy
from tests.support.service_helpers import RunningService, running_service
from tests.support.small_model import small_model

_FOUND: dict[Hashable, Any] = {}


def once(read: Callable[..., Any]) -> Callable[..., Any]:
    """`read(folder, …)`, which reads the files of a folder; later calls get what the first one found.

    Each run gets a backbone of its own, which it changes. Other places than folders are read each time.
    """

    def found(where: Any, *given: Any, **more: Any) -> Any:
        folder = Path(locate(str(where)))
        if not folder.is_dir():
            return read(where, *given, **more)
        files = ((file, file.stat()) for file in sorted(folder.rglob("*")))
        stamps = tuple((str(file), about.st_mtime_ns, about.st_size) for file, about in files)
        key = (read, str(where), given, *sorted(more.items()), stamps)
        if key not in _FOUND:
            _FOUND[key] = read(where, *given, **more)
        kept = _FOUND[key]
        return copy.deepcopy(kept) if isinstance(kept, PipelineBackbone) else kept

    return found


@once
def _clip(where: str, kind: Any, dtype: torch.dtype) -> Any:
    return pretrained(kind, where, dtype)


@pytest.fixture(scope="module", autouse=True)
def _reading_once() -> Iterator[None]:
    """Runs in this process read equal models and rewards once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load_backbone", once(load_backbone))
        patch.setattr(clipscore, "pretrained", lambda kind, where, dtype: _clip(where, kind, dtype))
        yield


@pytest.fixture(scope="module", autouse=True)
def _undrawn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Reports of runs have no charts, which take half of a small run's time; the tests in report/ draw them."""
    with pytest.MonkeyPatch.context() as patch:
        if "report" not in request.path.parts:
            patch.setattr(charts, "_svg", lambda *_: "<svg></svg>")
        yield


@pytest.fixture(scope="session")
def loaded() -> Backbone:
    """The smaller miniature, loaded once; tests must not modify it."""
    return load_backbone(small_model())


@pytest.fixture(scope="module")
def small_service() -> Iterator[RunningService]:
    """A service of the smaller miniature for each file of tests, with a store in memory."""
    with running_service(model=small_model()) as running:
        yield running


@pytest.fixture
def notes() -> Iterator[list[str]]:
    """Lines that a user would see, of all that the test logs."""
    found: list[str] = []
    with shown_log(found.append):
        yield found


@pytest.fixture
def backbone(loaded: Backbone) -> Backbone:
    """The loaded miniature with a copy of the transformer, into which a policy may be injected."""
    return own_copy(loaded)
