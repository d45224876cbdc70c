"""A first call of an algorithm, before a model is loaded: its loss of random samples must be usable."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from solrl_core.errors import described
from solrl_core.sampling.sampler import Recording

from solrl_trainer.algorithms.algorithm import (
    AlgorithmError,
    AlgorithmSettings,
    Velocities,
    advantages_of,
    loss_of,
    units_of,
)
from solrl_trainer.algorithms.registry import make_algorithm
from solrl_trainer.algorithms.training_data import TrainingSamples

ReturnedT = TypeVar("ReturnedT")

_GROUPS = 2
_LATENTS = (4, 32, 32)
_LEVELS = (1.0, 0.75, 0.5, 0.25)


def try_algorithm(settings: AlgorithmSettings, kept: int) -> None:
    """Compute advantages, units and loss of random samples, `kept` for each prompt, with these settings of a run.

    A ValueError names a method that fails, or returns something that cannot be used.
    """
    algorithm, generator = make_algorithm(settings), torch.Generator().manual_seed(0)

    def call(what: str, function: Callable[..., ReturnedT], *arguments: Any) -> ReturnedT:
        try:
            return function(*arguments)
        except AlgorithmError:
            raise
        except Exception as error:
            raise ValueError(
                f"algorithm {settings.name!r}: {what} failed on random samples with latents {list(_LATENTS)}, "
                f"{_GROUPS} prompts of {kept}: {described(error)}"
            ) from error

    count = _GROUPS * kept
    advantages = call("advantages", advantages_of, algorithm, torch.randn(_GROUPS, kept, generator=generator)).flatten()
    units = call("units", units_of, algorithm, advantages, kept)
    data = algorithm.trains_on
    states = torch.randn(len(_LEVELS), count, *_LATENTS, generator=generator)
    samples = TrainingSamples(
        latents=states[-1],
        advantages=advantages,
        conditioning={"": torch.zeros(_GROUPS, 1)},
        prompts=torch.arange(_GROUPS).repeat_interleave(kept),
        recording=Recording(_LEVELS, states, torch.zeros(len(_LEVELS) - 1, count)) if data.recorded else None,
    )
    sigmas = torch.tensor(data.sigmas(samples, _LEVELS), dtype=torch.float64)
    rows, noise = units.flatten(), data.draw(len(units), _LATENTS, generator)
    batch = data.batch(samples, rows, torch.ones_like(rows), sigmas, noise, torch.device("cpu"))
    current, fixed = (torch.randn(batch.x.shape, generator=generator) for _ in range(2))
    velocities = Velocities(current.requires_grad_(), dict.fromkeys(algorithm.fixed, fixed))
    call("loss", loss_of, algorithm.at(0), batch, velocities)
