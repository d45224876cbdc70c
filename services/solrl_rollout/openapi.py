"""The published contract: `python -m solrl_rollout.openapi > proto/openapi.json`."""

import json

from solrl_rollout.http.app import create_app
from solrl_rollout.settings import RolloutSettings


def document() -> str:
    """The OpenAPI document as it is published, independent of this machine's settings."""
    return json.dumps(create_app(RolloutSettings.model_construct()).openapi(), indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    print(document(), end="")
