"""The shipped miniature, loaded once for the tests of this folder, which must not modify its transformer."""

import pytest
from solrl_core.families import Backbone, load_backbone


@pytest.fixture(scope="session")
def backbone() -> Backbone:
    return load_backbone("mini-sana")
