"""Programs for tests with several ranks; each runs in a separate process."""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any


def solrl_train(argv: Sequence[str]) -> None:
    """`solrl-train`."""
    from solrl_trainer.cli import main

    sys.argv = ["solrl-train", *argv]
    main()


def with_weights_apart(argv: Sequence[str]) -> None:
    """`solrl-train`, with a fault in the arithmetic of rank 1."""
    from solrl_trainer.policy import Policy

    average = Policy.decay_and_average

    def faulty(policy: Policy, *rest: Any) -> None:
        if os.environ["RANK"] == "1":
            policy.parameters[0].data += 1
        average(policy, *rest)

    Policy.decay_and_average = faulty  # type: ignore[method-assign]
    solrl_train(argv)


def with_a_slow_rank(argv: Sequence[str]) -> None:
    """`solrl-train` with a limit of one second for collectives; rank 1 is three seconds late in each iteration."""
    from solrl_trainer.ranks import collectives
    from solrl_trainer.rollouts.iteration import IterationSamples

    collectives._LONGEST = 1.0
    gather = IterationSamples.gather.__func__  # type: ignore[attr-defined]

    def slow(cls: type[IterationSamples], *arguments: Any) -> IterationSamples:
        if os.environ["RANK"] == "1":
            time.sleep(3)
        found: IterationSamples = gather(cls, *arguments)
        return found

    IterationSamples.gather = classmethod(slow)  # type: ignore[assignment,method-assign]
    solrl_train(argv)
