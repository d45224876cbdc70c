"""Tiny models of each family, written and loaded once."""

from collections.abc import Callable
from functools import cache

import pytest
from tests.core.families.tiny_models import MODELS, Tiny, load_both


@pytest.fixture(scope="session")
def load_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """Loads a tiny model by its name."""
    models = tmp_path_factory.mktemp("models")
    return cache(lambda name: load_both(name, models))


@pytest.fixture(params=[name for name in MODELS if name != "sana/mini"])
def tiny(request: pytest.FixtureRequest, load_tiny: Callable[[str], Tiny]) -> Tiny:
    """Each tiny model but SANA, whose pipeline has another sampler."""
    return load_tiny(request.param)
