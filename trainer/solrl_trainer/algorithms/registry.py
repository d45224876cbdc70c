"""Algorithms by name: built-in, by entry point, or `package.module:attribute`."""

import inspect
from typing import Any, get_args

from solrl_core.registry import Registry

from solrl_trainer.algorithms.algorithm import Algorithm, AlgorithmSettings, FixedPolicy


def _wrong(algorithm: Any) -> str | None:
    module = Algorithm.__module__
    if not (isinstance(algorithm, type) and issubclass(algorithm, Algorithm)):
        return f"a subclass of {module}.Algorithm"
    if not (isinstance(algorithm.Settings, type) and issubclass(algorithm.Settings, AlgorithmSettings)):
        return f"`Settings` to be a subclass of {module}.AlgorithmSettings, not {algorithm.Settings!r}"
    if inspect.isabstract(algorithm):
        return f"it to define {' and '.join(f'`{name}`' for name in sorted(algorithm.__abstractmethods__))}"
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


def make_algorithm(settings: AlgorithmSettings) -> Algorithm[Any, Any]:
    """The algorithm of a run's settings; a ValueError if its `fixed` names a policy that does not exist."""
    algorithm, policies = ALGORITHMS.find(settings.name)(settings), get_args(FixedPolicy)
    if not isinstance(algorithm.fixed, tuple) or not set(algorithm.fixed) <= set(policies):
        raise ValueError(
            f"algorithm {settings.name!r}: `fixed` is {algorithm.fixed!r}; expected a tuple of some of {policies}"
        )
    return algorithm
