"""docker-compose.yml is read without settings of this environment."""

import pytest


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("SOLRL_")]:
        monkeypatch.delenv(name)
