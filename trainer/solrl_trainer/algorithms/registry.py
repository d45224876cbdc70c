"""Algorithms by name: built-in, by entry point, or `package.module:attribute`."""

from typing import Any

from solrl_core.registry import Registry

from solrl_trainer.algorithms.algorithm import Algorithm, AlgorithmSettings


def _wrong(algorithm: Any) -> str | None:
    module = Algorithm.__module__
    if not (isinstance(algorithm, type) and issubclass(algorithm, Algorithm)):
        return f"a subclass of {module}.Algorithm"
    if not (isinstance(algorithm.Settings, type) and issubclass(algorithm.Settings, AlgorithmSettings)):
        return f"`Settings` to be a subclass of {module}.AlgorithmSettings, not {algorithm.Settings!r}"
    return None


ALGORITHMS: Registry[type[Algorithm[Any, Any]]] = Registry(
    "algorithm",
    "solrl.algorithms",
    {
        "awm": "solrl_trainer.algorithms.awm:Awm",
        "dancegrpo": "solrl_trainer.algorithms.dancegrpo:DanceGrpo",
        "diffusionnft": "solrl_trainer.algorithms.diffusionnft:DiffusionNft",
        "dpo": "solrl_trainer.algorithms.dpo:DiffusionDpo",
        "flowgrpo": "solrl_trainer.algorithms.flowgrpo:FlowGrpo",
        "sft": "solrl_trainer.algorithms.sft:Sft",
    },
    wrong=_wrong,
)
