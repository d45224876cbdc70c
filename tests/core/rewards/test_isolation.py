"""What a reward does to its arguments, its scores and the process reaches neither other rewards nor the run."""

import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from solrl_core.rewards import RewardSet
from solrl_core.rewards.reward import PlainDefaults

TEXTS = ["one", "two"]
KEPT: Any = []


def images_of(count: int = 2) -> torch.Tensor:
    return torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def brightness(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    return images.mean((1, 2, 3)) + torch.tensor(
        [len(prompt) + len(one) for prompt, one in zip(prompts, metadata, strict=True)]
    )


def test_what_a_reward_writes_reaches_no_other_reward_and_not_the_caller() -> None:
    def writes(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        images.sub_(0.5).div_(0.25)
        prompts[0] += " and more"
        metadata[0]["seen"] = True
        metadata[1]["tags"].append("seen")
        return images.mean((1, 2, 3))

    images, texts, metadata = images_of(), list(TEXTS), [{}, {"tags": []}]
    rewards = RewardSet({"writes": writes, "brightness": brightness})
    expected = brightness(images, texts, metadata)
    found = rewards.score(rewards.names, images, texts, metadata)
    assert torch.equal(found["brightness"], expected)
    assert torch.equal(images, images_of())
    assert (texts, metadata) == (TEXTS, [{}, {"tags": []}])


def test_an_image_is_blamed_for_a_failure_of_its_own_only() -> None:
    def fails_when_dark(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        assert images.min() >= 0, "written to before"
        images.neg_()
        raise ValueError("no such luck")

    with pytest.raises(RuntimeError, match="image 0 of prompt 'one': ValueError: no such luck"):
        RewardSet({"a": fails_when_dark}).score(["a"], images_of(), TEXTS, [{}, {}])


def test_scores_stay_although_a_reward_reuses_the_tensor_that_it_returns() -> None:
    buffer = torch.zeros(2)

    def counts(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        return buffer.add_(1)

    rewards = RewardSet({"counts": counts})
    first, second = (rewards.score(["counts"], images_of(), TEXTS, [{}, {}])["counts"] for _ in range(2))
    assert (first.tolist(), second.tolist()) == ([1, 1], [2, 2])


def enter_for_good(context: Any) -> None:
    KEPT.append(context)  # its end would put back what it changed
    context.__enter__()


def set_fp32_precision(value: str) -> None:
    torch.backends.fp32_precision = value  # type: ignore[attr-defined]


def set_backend(path: str, value: Any) -> None:
    backend, _, attribute = path.rpartition(".")
    owner: Any = torch.backends
    for part in backend.split("."):
        owner = getattr(owner, part)
    setattr(owner, attribute, value)


CHANGES: dict[str, tuple[Callable[[], object], Callable[[], Any], str]] = {
    "gradients": (lambda: torch.set_grad_enabled(True), torch.is_grad_enabled, "whether gradients"),
    "inference": (
        lambda: enter_for_good(torch.inference_mode()),
        torch.is_inference_mode_enabled,
        "whether gradients",
    ),
    "dtype": (lambda: torch.set_default_dtype(torch.float16), torch.get_default_dtype, "the default dtype"),
    "device": (lambda: torch.set_default_device("meta"), torch.get_default_device, "the default device"),
    "autocast": (
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: torch.is_autocast_enabled("cpu"),
        "autocast on cpu",
    ),
    "tf32": (
        lambda: set_backend("cuda.matmul.allow_tf32", True),
        lambda: torch.backends.cuda.matmul.allow_tf32,
        "float32 matmul precision",
    ),
    "cudnn": (
        lambda: set_backend("cudnn.allow_tf32", False),
        lambda: torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        "torch.backends.cudnn.allow_tf32",
    ),
    "newer tf32": (lambda: set_fp32_precision("tf32"), torch.get_float32_matmul_precision, "backends.fp32_precision"),
    "benchmark": (
        lambda: set_backend("cudnn.benchmark", True),
        lambda: torch.backends.cudnn.benchmark,
        "cudnn.benchmark",
    ),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        torch.are_deterministic_algorithms_enabled,
        "deterministic algorithms",
    ),
    "threads": (lambda: torch.set_num_threads(3), torch.get_num_threads, "number of threads"),
    "numpy errors": (lambda: np.seterr(all="raise"), np.geterr, "numpy's handling"),
    "folder": (lambda: os.chdir("/"), os.getcwd, "the working directory"),
    "torch seed": (lambda: torch.manual_seed(7), lambda: torch.get_rng_state().tolist(), "torch's random numbers"),
    "numpy seed": (lambda: np.random.seed(7), lambda: np.random.get_state()[1].tolist(), "numpy's random numbers"),
    "python seed": (lambda: random.seed(7), random.getstate, "Python's random numbers"),
}


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "fails"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_reward_changes_of_the_process_is_put_back_and_the_reward_named(
    change: str, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    make, read, name = CHANGES[change]

    def changes(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        make()
        if fails:
            raise ValueError("no such luck")
        return torch.zeros(len(images), device="cpu")

    before, rewards = read(), RewardSet({"changes": changes, "brightness": brightness})
    for _ in range(2):
        if fails:
            with pytest.raises(RuntimeError, match="no such luck"):
                rewards.score(["changes"], images_of(), TEXTS, [{}, {}])
        else:
            rewards.score(["changes", "brightness"], images_of(), TEXTS, [{}, {}])
    assert read() == before
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("reward 'changes' changes ")
    assert name in said


class ChangesAsItLoads:
    def __init__(self, *, device: str = "cpu") -> None:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        torch.nn.Linear(2, 2)

    __call__ = staticmethod(brightness)


def test_loading_a_reward_changes_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"{__name__}:ChangesAsItLoads"
    RewardSet.load([name], PlainDefaults(torch.device("cpu")))
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32
    (tmp_path / "changes_as_imported.py").write_text(
        "import torch\ntorch.set_grad_enabled(False)\ndef reward(*given):\n    return given[0][:, 0, 0, 0]"
    )
    monkeypatch.syspath_prepend(tmp_path)
    RewardSet.load(["changes_as_imported:reward"], PlainDefaults(torch.device("cpu")))
    assert torch.is_grad_enabled()
    first, second = [record.getMessage() for record in caplog.records]
    assert "whether gradients are computed, the default dtype, which" in first
    assert "'changes_as_imported:reward' changes whether gradients are computed, which" in second
