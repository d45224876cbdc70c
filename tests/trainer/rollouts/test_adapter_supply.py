"""The versions of a run at a real service: pushed, rewound, and pushed again."""

from solrl_client.retries import Wait
from solrl_client.rollouts import RolloutClient
from solrl_core.families import Backbone
from solrl_core.lora import adapter_layout
from solrl_proto.adapters import adapter_digest
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_trainer.service.adapter_supply import AdapterSupply
from tests.support.service_helpers import MODEL, RunningService, adapter_file


def supply_of(client: RolloutClient) -> AdapterSupply:
    return AdapterSupply(client, run="behind", model=MODEL, lag=0)


class Restarting(RolloutClient):
    """A client whose service loses the run before the rewind."""

    def rewind(self, run: str, version: int, head: int) -> None:
        self.delete(run)
        super().rewind(run, version, head)


def test_a_run_is_rewound_and_pushed_again_only_if_the_service_lost_its_versions(
    small_service: RunningService, loaded: Backbone
) -> None:
    layout = adapter_layout(loaded.transformer, loaded.lora_targets)
    files = [adapter_file(layout, seed) for seed in range(4)]
    own = {adapter_digest(file) for file in files}

    def held() -> list[int]:
        return [info.version for info in client.adapters("behind").versions]

    with RolloutClient(small_service.url) as client, Restarting(small_service.url) as restarting:
        supply = supply_of(client)
        supply.start({0: files[0]})
        for version in (1, 2, 3):
            supply.push(version, files[version])
        supply_of(client).start({1: files[1], 2: files[2]}, own)
        assert held() == [0, 1, 2]
        restarting.push("behind", 3, 2, MODEL, files[3])
        supply_of(restarting).start({2: files[2]}, own)
        assert held() == [2]
        small_service.client.delete("/v1/runs/behind").raise_for_status()
        client.push("behind", 2, None, MODEL, files[2])
        supply_of(client).start({0: files[0], 1: files[1]}, own)
        assert held() == [0, 1]


def test_all_requests_of_a_loss_are_repeated(small_service: RunningService, loaded: Backbone, notes: list[str]) -> None:
    """The first one's call pushes what is missing; the others find it there."""
    file = adapter_file(adapter_layout(loaded.transformer, loaded.lora_targets), 0)
    with RolloutClient(small_service.url) as client:
        told: list[tuple[str, Wait | None]] = []
        supply = AdapterSupply(client, run="lost", model=MODEL, lag=1, on_wait=lambda *wait: told.append(wait))
        supply.start({0: file})
        for version in (1, 2):
            supply.push(version, file)
        client.delete("lost")
        lost = ProblemError(ProblemKind.RUN_NOT_FOUND, "gone").problem
        assert [supply.restore(lost) for _ in range(2)] == [True, True]
        held = client.adapters("lost")
        assert held.head == 2
        assert not supply.restore(ProblemError(ProblemKind.PARENT_CONFLICT, "another head").problem)
    assert told == [(client.url, None)]
    assert notes == ["the service had lost this run's versions 0, 1 and 2; pushed again"]
