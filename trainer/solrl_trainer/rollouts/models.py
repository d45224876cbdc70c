"""The models of a run: one base, the policies trained on it, and the generators that sample from them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from solrl_core.adapter import Adapter, EncodedAdapter, decode_adapter
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.precision.support import fastest_precision
from solrl_core.sampling.generator import Generator

from solrl_trainer.memory.run_memory import explored_precision, find_layout
from solrl_trainer.policy.encoders import Encoders
from solrl_trainer.policy.policy import Policy
from solrl_trainer.policy.sharding import place, shard_base
from solrl_trainer.ranks.communicator import Communicator
from solrl_trainer.settings.config import RunConfig


@dataclass
class Models:
    """A backbone with its generators and policies.

    Attributes:
        generator: BF16 generator for regenerated samples and evaluations.
        explorer: generator of local exploration; `generator` itself if that explores in BF16 or not at all.
        world: ranks that train together, in step if they share the base's weights.
        version: version of the behaviour policy, which is the number of finished iterations.
    """

    backbone: PipelineBackbone
    generator: Generator
    explorer: Generator
    policy: Policy
    encoders: Encoders
    world: Communicator
    version: int = field(default=0, init=False)
    _behaviour: Adapter | None = field(default=None, init=False)

    @classmethod
    def build(cls, backbone: PipelineBackbone, config: RunConfig, world: Communicator | None = None) -> "Models":
        """Build generators and policies on a clean backbone, in the only order that works.

        A generator copies the clean transformer and keeps references to the weights under each adapter. The policy
        then replaces the layers in place, so every generator comes before the policy. Transformer and text encoders
        may be in host memory; they are moved as the memory plan says. The base may be spread over the `world`.
        """
        world = world or Communicator()
        layout = find_layout(config, backbone, world)
        encoders = Encoders(backbone, offloaded=layout.offloaded)
        backbone.cache_at_least(config.explore.prompts)
        if not layout.sharded:
            place(backbone.transformer, backbone.device)
        generator = Generator(backbone, "bf16")
        precision = explored_precision(config, fastest_precision(backbone.device))
        explorer = generator
        if precision != generator.precision:
            explorer = Generator(backbone, precision)
            place(explorer.transformer, backbone.device)  # whole, also where the base is sharded
        policy = Policy(backbone, config.lora, config.seed)
        policy.checkpoint_activations(layout.checkpointed)
        if layout.sharded:
            explorers = [] if explorer is generator else [explorer]
            world = shard_base(backbone, generator, explorers, policy, world)
        return cls(backbone, generator, explorer, policy, encoders, world)

    def merge_behaviour(self, adapter: bytes, version: int) -> None:
        """Merge a version of the behaviour policy; `adapter` is the file that a service gets, too."""
        self.version = version
        if isinstance(adapter, EncodedAdapter):
            self._behaviour = adapter.adapter
        else:
            self._behaviour = decode_adapter(adapter, self.generator.layout)
        self.generator.set_adapter(self._behaviour)
        if self.explorer is not self.generator:
            self.explorer.set_adapter(self._behaviour)

    @contextmanager
    def serving(self, adapter: Adapter | None) -> Iterator[Generator]:
        """Merge `adapter` (None: the base) into the BF16 generator within the block, then the behaviour policy again.

        After an error in the block the generator keeps `adapter`.
        """
        self.generator.set_adapter(adapter)
        yield self.generator
        # Not after an error: merging into a sharded base is a collective, which the other ranks would not join.
        if self._behaviour is not None:
            self.generator.set_adapter(self._behaviour)
