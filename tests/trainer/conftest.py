"""The shipped miniature, with a copy of its transformer for each test that trains it."""

import copy

import pytest
from solrl_core.families import Backbone, load_backbone


@pytest.fixture(scope="session")
def loaded() -> Backbone:
    """The miniature, loaded once; tests must not modify it."""
    return load_backbone("mini-sana")


@pytest.fixture
def backbone(loaded: Backbone) -> Backbone:
    """The loaded miniature with a copy of the transformer, into which a policy may be injected."""
    mine = copy.copy(loaded)
    mine.transformer = copy.deepcopy(loaded.transformer)
    return mine
