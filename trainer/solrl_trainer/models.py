"""The models of a run: one base, the policies trained on it, and the generators that sample from them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from solrl_core.adapter import Adapter, decode_adapter
from solrl_core.families import Backbone
from solrl_core.generator import Generator

from solrl_trainer.config import RunConfig
from solrl_trainer.policy import Policy
from solrl_trainer.training_memory import blocks_to_recompute


@dataclass
class Models:
    """A backbone with its generators and policies.

    Attributes:
        backbone: the model, whose transformer is trained.
        generator: BF16 generator for regenerated samples and evaluations.
        behaviour: generator with the behaviour policy merged: `generator`, or one at the precision of local candidates.
        policy: current, behaviour and reference policies.
    """

    backbone: Backbone
    generator: Generator
    behaviour: Generator
    policy: Policy
    _merged: bytes | None = field(default=None, init=False)

    @classmethod
    def build(
        cls, backbone: Backbone, config: RunConfig, *, precision: str = "bf16", note: Callable[[str], None]
    ) -> "Models":
        """Build everything on a clean backbone, in the only order that works.

        A generator copies the clean transformer and keeps references to the weights under each adapter. The policy
        then replaces those layers in place, so every generator comes before the policy.

        Args:
            backbone: the loaded model; its transformer gets the policy's adapters.
            config: the run's settings.
            precision: of the behaviour generator.
            note: shows a line of text to a person.
        """
        generator = Generator(backbone, "bf16")
        behaviour = generator if precision == generator.precision else Generator(backbone, precision)
        return cls(backbone, generator, behaviour, build_policy(backbone, config, note))

    def merge_behaviour(self, adapter: bytes) -> None:
        """Merge a version of the behaviour policy; `adapter` is the file that the service gets, too."""
        self.behaviour.set_adapter(decode_adapter(adapter, self.behaviour.layout))
        self._merged = adapter

    @contextmanager
    def serving(self, adapter: Adapter | None) -> Iterator[Generator]:
        """Merge `adapter` (None: the base) into the BF16 generator within the block; restores the previous one."""
        self.generator.set_adapter(adapter)
        try:
            yield self.generator
        finally:
            if self.behaviour is self.generator and self._merged is not None:
                self.merge_behaviour(self._merged)


def build_policy(backbone: Backbone, config: RunConfig, note: Callable[[str], None]) -> Policy:
    """Put the run's adapters into the backbone's transformer, and plan which activations are kept for the gradient."""
    reference = None
    if config.optimizer.reference == "fp8" and backbone.device.type == "cuda":
        reference = Generator(backbone, "fp8").transformer
    recomputed = blocks_to_recompute(config, backbone, note)
    policy = Policy(backbone, config.lora, config.seed, reference=reference)
    policy.recompute(recomputed)
    return policy
