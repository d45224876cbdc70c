"""Supervised fine-tuning by flow matching, on stored images with captions."""

from __future__ import annotations

from solrl_trainer.algorithms.algorithm import Algorithm, AlgorithmSettings, Loss, Velocities
from solrl_trainer.algorithms.training_data import ForwardBatch, ForwardProcess


class Sft(Algorithm[AlgorithmSettings, ForwardBatch]):
    """The mean squared error of the velocity at x_t = (1 − t)·x0 + t·noise, whose true value is noise − x0."""

    trains_on = ForwardProcess()
    compares = False

    def loss(self, batch: ForwardBatch, velocity: Velocities) -> Loss:
        return Loss((velocity.current - (batch.noise - batch.x0)).square().mean(), {})
