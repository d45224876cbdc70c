"""Rewards in the service, at a reward server of its, in the trainer, and at one of its: the same scores and faults."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from solrl_core.errors import RewardError, RewardUnavailableError
from solrl_core.rewards import RewardSet
from solrl_core.rewards.reward import PlainDefaults
from solrl_core.sampling.generator import GeneratorOutput
from solrl_core.sampling.noise import initial_noise
from solrl_core.sampling.sampler import Trajectory
from solrl_core.sampling.solvers import Euler
from solrl_engine.scorer import Scorer
from solrl_engine.side_stream import SideStream
from solrl_proto.problems import ProblemKind
from solrl_proto.rollouts import PromptItem, RewardSpec
from solrl_remote.remote_reward import connect_reward
from solrl_reward.app import create_app
from solrl_reward.settings import RewardSettings
from solrl_rollout.http.app import create_app as create_rollout_app
from solrl_rollout.settings import RolloutSettings
from solrl_trainer.rollouts.sample_scorer import SampleScorer
from tests.services import faulty_rewards
from tests.services.fake_backend import SHAPE, FakeBackend
from tests.services.reward_servers import serving
from tests.support.service_helpers import rollout_request

NAMES = ("picky", "twice", "few", "leave", "end", "listed", "complex_numbers")
WANT, TWICE, FEW, LEAVE, END, LISTED, COMPLEX = (f"tests.services.faulty_rewards:{name}" for name in NAMES)
PLACES = ("service", "service's server", "trainer", "trainer's server")
TEXT, SEEDS = "a red circle", [1, 2, 3]
CPU = torch.device("cpu")

Outcome = tuple[Any, ...]
"""Scores, and values of each reward; or the kind of fault, and what is said of it."""
Score = Callable[[Mapping[str, float], Mapping[str, Any]], Outcome]
"""Scores images with these rewards and weights, of a prompt with this metadata."""


FIRST = "failed on image 0 of prompt 'a red circle': "


def line_of(text: str) -> str:
    """The first line of `faulty_rewards` with a text."""
    lines = Path(faulty_rewards.__file__).read_text().splitlines()
    return f"(faulty_rewards.py:{next(number for number, line in enumerate(lines, 1) if text in line)})"


def in_service(client: httpx.Client, weights: Mapping[str, float], metadata: Mapping[str, Any]) -> Outcome:
    request = rollout_request([TEXT], seeds=[SEEDS], metadata=dict(metadata), precision="bf16")
    rewards = [{"name": name, "weight": weight} for name, weight in weights.items()]
    answer = client.post("/v1/rollouts", json=request | {"rewards": rewards})
    found = answer.json()
    if answer.status_code == 200:
        (group,) = found["groups"]
        return tuple(group["scores"]), {name: tuple(values) for name, values in group["rewards"].items()}
    kind = (found["type"].rpartition(":")[2], answer.status_code, "retry-after" in answer.headers)
    faults = {(ProblemKind.REWARD_FAILED, 500, False): "fails", (ProblemKind.SCORE_NONFINITE, 422, False): "overflows"}
    return faults[kind], found["detail"]


def made(images: torch.Tensor) -> GeneratorOutput:
    solver = Euler()
    solver.history = (images,)
    return GeneratorOutput(Trajectory(images, solver), images)


def in_trainer(loaded: RewardSet, weights: Mapping[str, float], metadata: Mapping[str, Any]) -> Outcome:
    trained = [RewardSpec(name=name, weight=weight) for name, weight in weights.items() if weight]
    images = initial_noise(SEEDS, SHAPE)
    prompt = PromptItem(id="p", text=TEXT, metadata=dict(metadata))
    scorer = SampleScorer(Scorer(loaded), list(weights), trained, SideStream(CPU))
    try:
        found = scorer.score_samples([prompt] * len(images), made(images))()
    except RewardError as error:
        return "away" if isinstance(error, RewardUnavailableError) else "fails", str(error)
    except OverflowError as error:
        return "overflows", str(error)
    return tuple(found.scores.tolist()), {name: tuple(values.tolist()) for name, values in found.rewards.items()}


@pytest.fixture(scope="module")
def everywhere() -> Iterator[dict[str, Score]]:
    """Each place's function."""
    names, found = (WANT, TWICE, FEW, LEAVE, END, LISTED, COMPLEX), dict[str, Score]()
    with ExitStack() as stack:
        address = stack.enter_context(serving(create_app(RewardSettings(rewards=names, device="cpu"))))
        for place, options in ((PLACES[0], {}), (PLACES[1], {name: {"at": address} for name in names})):
            settings = RolloutSettings(rewards=names, reward_options=options, device="cpu")
            there = stack.enter_context(serving(create_rollout_app(settings, load_backend=FakeBackend().load)))
            client = stack.enter_context(httpx.Client(base_url=there, timeout=600))
            found[place] = partial(in_service, client)
            loaded = RewardSet.load(names, PlainDefaults(CPU), options, connect=connect_reward)
            found[place.replace("service", "trainer")] = partial(in_trainer, loaded)
        yield found


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("weights", "score"),
    [({WANT: 1}, 0.3), ({TWICE: 0.1, WANT: -2.5}, -0.69), ({WANT: 0, TWICE: 3}, 1.8), ({TWICE: 3, WANT: 0}, 1.8)],
    ids=["one", "a sum", "one only logged", "the other only logged"],
)
def test_scores_are_equal(everywhere: dict[str, Score], place: str, weights: dict[str, float], score: float) -> None:
    scores, rewards = everywhere[place](weights, {"want": 0.3})
    values = {WANT: torch.tensor([0.3] * 3), TWICE: torch.tensor([0.6] * 3)}
    assert rewards == {name: tuple(values[name].tolist()) for name in weights}
    assert (scores, rewards) == everywhere[PLACES[0]](weights, {"want": 0.3})
    assert scores == pytest.approx([score] * 3)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("weight", [1, 0], ids=["trained", "only logged"])
@pytest.mark.parametrize(
    ("name", "want", "said"),
    [
        (WANT, "nan", "gave nan for image 0 of prompt 'a red circle'"),
        (WANT, "-inf", "gave -inf for image 0 of prompt 'a red circle'"),
        (WANT, "many", f"{FIRST}ValueError: could not convert string to float: 'many' {line_of('float(one')}"),
        (FEW, 1, "gave shape (2,); expected (3,)"),
        (LEAVE, 1, f"{FIRST}SystemExit: a package's own end {line_of('sys.exit(')}"),
        (END, 1, f"{FIRST}End: not this thread {line_of('raise End(')}"),
        (LISTED, 1, "gave a value of type list of 3; expected a tensor of shape (3,), such as torch.tensor(scores)"),
        (COMPLEX, 1, "gave complex numbers (torch.complex64); expected a tensor of shape (3,) of real numbers"),
    ],
    ids=["NaN", "infinite", "an error", "a wrong count", "leaves", "ends its thread", "a list", "complex numbers"],
)
def test_faults_agree(everywhere: dict[str, Score], place: str, name: str, want: Any, said: str, weight: float) -> None:
    fault, told = everywhere[place](
        {"tests.services.faulty_rewards:twice" if name != TWICE else WANT: 1, name: weight}, {"want": want}
    )
    assert fault == "fails"
    assert told.endswith(f"reward {name!r} {said}")


@pytest.mark.parametrize("place", PLACES)
def test_a_sum_that_overflows_is_refused(everywhere: dict[str, Score], place: str) -> None:
    fault, told = everywhere[place]({WANT: 3e38, TWICE: 1}, {"want": 10})
    assert fault == "overflows"
    assert "the weighted sum of the rewards" in told


def test_images_that_are_not_finite_are_not_scored() -> None:
    seen: list[Any] = []

    def reward(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        seen.append(images)
        return torch.zeros(len(images))

    images = initial_noise(SEEDS, SHAPE)
    images[1, 0, 0, 0] = torch.nan
    scorer = SampleScorer(Scorer(RewardSet({"a": reward})), ["a"], [RewardSpec(name="a")], SideStream(CPU))
    with pytest.raises(FloatingPointError, match="images that are not finite"):
        scorer.score_samples([PromptItem(id="p", text=TEXT)] * len(images), made(images))
    assert seen == []
