"""The shipped miniature, loaded once for the tests of this folder; they leave its transformer as it is."""

import pytest
from solrl_core.families import Backbone, load_backbone


@pytest.fixture(scope="session")
def backbone() -> Backbone:
    return load_backbone("mini-sana")
