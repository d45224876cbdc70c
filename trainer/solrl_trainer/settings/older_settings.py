"""Settings of runs from earlier versions of the program."""

import json
from typing import Any

from solrl_trainer.settings.config import PolicySettings, RunConfig


def read_settings(text: str) -> RunConfig:
    """Settings of a run from its config.json, written by this or an earlier version.

    Until version 0.1 one section, `objective`, held what is now `algorithm` and `policy`, and local candidates were
    always trained on themselves. A setting that the file lacks has its default.

    Raises:
        ValueError: not JSON, or not settings of a run.
    """
    values: dict[str, Any] = json.loads(text)
    if "objective" in values:
        algorithm = values.pop("objective")
        values["policy"] = {name: algorithm.pop(name) for name in PolicySettings.model_fields if name in algorithm}
        values["algorithm"] = algorithm
    if "evaluate" in values:
        # Evaluations along a run generated all images.
        values["evaluate"] = {"every": 0, "curve_seeds": values["evaluate"].get("seeds", 4)} | values["evaluate"]
    if values.get("explore", {}).get("source") == "local":
        values["regenerate"] = {"at": "none"} | values.get("regenerate", {})
    return RunConfig.model_validate(values)
