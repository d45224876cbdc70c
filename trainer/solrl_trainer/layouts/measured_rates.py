"""Rates of this machine's GPU for a run's model: small groups and one update, by the run's own loop."""

import time

import torch
from solrl_client.retries import ignore
from solrl_core.adapter import encode_adapter

from solrl_trainer.algorithms.algorithm import advantages_of
from solrl_trainer.layouts.layouts import MeasuredRates, Stages, fit_rates
from solrl_trainer.loop import collect_samples, training_samples
from solrl_trainer.policy.update import trained_steps
from solrl_trainer.prompts.prompt_sets import PromptSet, prompts_of_run
from solrl_trainer.ranks.communicator import Communicator
from solrl_trainer.records.run_log import RunLog
from solrl_trainer.rollouts.device_source import DeviceSource, open_device_source
from solrl_trainer.session import Session, connect
from solrl_trainer.settings.config import RunConfig

_CANDIDATES = 24
_MORE, _FEWER = 4, 2
"""Exploring steps of two groups, whose difference is that of the steps alone. The second is regenerated in 2, too."""


def measure_rates(config: RunConfig) -> MeasuredRates:
    """Load a run's model and rewards, and measure its stages on one GPU.

    A group of 24 candidates is explored and regenerated in 2 steps and trained, which compiles. Then a group of 4
    exploring steps is timed through all stages, and the exploring of one of 2. The run's service is left out.

    Raises:
        ValueError, OSError: model, reward or prompts cannot be loaded, or the GPU does not explore at the precision.
    """
    train = prompts_of_run(config.prompt_sources, "train")
    # Half of the steps: seconds are proportional to steps, of regenerating and, through their number, of training.
    more = _small(config, _MORE, -(-config.regenerate.steps // 2))
    fewer = _small(config, _FEWER, _FEWER)
    with open_device_source(more, train, Communicator(), ignore) as source:
        first, second = (
            connect(settings, DeviceSource(settings, source.loaded, source.models, train), train, PromptSet((), ()))
            for settings in (more, fewer)
        )
        for session in (first, second):
            session.start({0: encode_adapter(source.models.policy.behaviour())}, ())
        _timed(second)
        slow, log = _timed(first), RunLog()
        collect_samples(second, log, 0)
        device = source.models.backbone.device
    candidates, keep, steps = more.explore.candidates, more.explore.keep, more.regenerate.steps
    rates = fit_rates(
        candidates,
        ((_MORE, slow.explore), (_FEWER, log.elapsed("wait"))),
        (steps, slow.regenerate * candidates / keep),
        slow.train / keep / trained_steps(steps, more.algorithm.timestep_fraction),
    )
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return MeasuredRates(gpu=gpu, model=config.model, rates=rates)


def _small(config: RunConfig, steps: int, regenerated_steps: int) -> RunConfig:
    """The settings with one small group per iteration, which is explored and regenerated here in these steps."""
    raw = config.model_dump()
    raw["rollout_url"] = None
    candidates = min(config.explore.candidates, _CANDIDATES)
    raw["explore"] |= {
        "lag": 0,
        "share": 1,
        "prompts": 1,
        "candidates": candidates,
        "keep": min(config.explore.keep, candidates),
        "steps": steps,
        "precision": config.explore.precision if config.two_stage else "auto",
        "prune": None,
        "fitted": None,
        "sampler": "ode",
        "calibrated_for": None,
    }
    raw["regenerate"] |= {"steps": regenerated_steps, "at": "trainer"}
    return RunConfig.model_validate(raw)


def _timed(session: Session) -> Stages:
    """Seconds of one prompt's stages; each ends with figures on the host, so the GPU has finished it."""
    log = RunLog()
    samples = collect_samples(session, log, 0)
    chosen = training_samples(session, samples, advantages_of(session.updater.algorithm, samples.scores))
    began = time.perf_counter()
    session.updater.update(chosen, 0)
    return Stages(log.elapsed("wait"), log.elapsed("regenerate"), time.perf_counter() - began)
