"""The vLLM-Omni backend on a fake engine with its call surface: it answers like the local one, or says why not."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from solrl_core.adapter import Adapter, lora_a_key, lora_b_key
from solrl_core.sampling.generator import GeneratorOutput
from solrl_engine.backend import AdapterMergeError, Backend, GenerationRequest
from solrl_proto.rollouts import FittedSolver, Plan, StochasticSteps
from solrl_rollout.doctor import check
from solrl_rollout.engine.backends import load_backend
from solrl_rollout.engine.backends.vllm_omni import support
from solrl_rollout.engine.backends.vllm_omni.backend import VllmOmniBackend, checkpoint_digest
from solrl_rollout.engine.backends.vllm_omni.peft_adapters import peft_folder
from solrl_rollout.engine.work import VersionedAdapter
from solrl_rollout.settings import ModelSpec, RolloutSettings, parse_model
from tests.services import fake_vllm_omni
from tests.support.adapters import random_adapter

MODEL = "mini-flux"
CLOSE = 2e-3
"""Largest difference of a pixel: a fused projection rounds differently."""
FITTED = FittedSolver(sigmas=(1.0, 0.5), step_coeffs=((0.5, 0.5),), x0_coeffs=((0.0, 1.0), (0.0, 0.3, 0.7)))
PLANS = [
    Plan(steps=4, guidance=2.0),
    Plan(steps=4, solver="dpm2"),
    Plan(steps=2, fitted=FITTED),
    Plan(steps=4, sde=StochasticSteps(kind="flow", eta=0.7, first=1)),
]


@pytest.fixture(scope="module")
def patched() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        fake_vllm_omni.install(patch)
        yield patch


def load(engine: str, model: str = MODEL, **settings: Any) -> Backend:
    return load_backend(parse_model(model), RolloutSettings(engine=engine, device="cpu", **settings))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def local() -> Backend:
    return load("solrl", precision="bf16")


@pytest.fixture(scope="module")
def omni(patched: pytest.MonkeyPatch) -> Iterator[Backend]:
    backend = load("vllm-omni")
    yield backend
    backend.close()
    assert fake_vllm_omni.DiffusionEngine.last.closed


@pytest.fixture(autouse=True)
def base(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in ("local", "omni"):
        if name in request.fixturenames:
            request.getfixturevalue(name).set_adapter("bf16", None)


def versioned(backend: Backend, seed: int, size: float = 0.2) -> VersionedAdapter:
    digest = hashlib.sha256(f"{seed} {size}".encode()).hexdigest()
    return VersionedAdapter(f"sha256:{digest}", random_adapter(dict(backend.identity.adapter_layout), seed, size))


def generate(
    backend: Backend, between: Callable[[], None] = lambda: None, batch_size: int = 24, **fields: Any
) -> GeneratorOutput:
    seeds = fields.pop("seeds", [3, 1, 4, 1, 5])
    request = GenerationRequest(["a red circle"] * len(seeds), seeds, Plan(steps=4), "bf16")
    return backend.generate(replace(request, **fields), batch_size, between)


def off(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def test_identities_are_equal(local: Backend, omni: Backend) -> None:
    ours, theirs = local.identity, omni.identity
    assert theirs.digests == ours.digests
    assert replace(theirs, digests={}) == replace(ours, digests={})
    assert "transformer" in theirs.digests


@pytest.mark.parametrize("plan", PLANS, ids=["euler", "dpm2", "fitted", "sde"])
def test_images_are_the_local_ones(local: Backend, omni: Backend, plan: Plan) -> None:
    ours, theirs = (generate(backend, plan=plan).images for backend in (local, omni))
    assert theirs.shape == ours.shape
    assert off(theirs, ours) < CLOSE
    assert off(theirs[1], theirs[0]) > 0.1
    assert torch.equal(theirs[1], theirs[3])  # of one seed


def test_a_batch_size_cuts_the_chunk(omni: Backend) -> None:
    steps: list[int] = []
    together = generate(omni)
    apart = generate(omni, lambda: steps.append(0), batch_size=2)
    assert len(steps) == 3 * 4
    assert off(apart.images, together.images) < CLOSE


def test_an_adapter_changes_images_like_a_merged_one_of_its_scale(local: Backend, omni: Backend) -> None:
    plain = generate(omni).images
    small = versioned(omni, 1, 0.1)
    scaled = VersionedAdapter("sha256:" + "f" * 64, replace(small.adapter, alpha=8.0))
    omni.set_adapter("bf16", small)
    others = {0: plain, 1: plain, 2: generate(omni).images}
    for at, adapter in enumerate((versioned(omni, 1), versioned(omni, 2), scaled)):
        for backend in (local, omni):
            backend.set_adapter("bf16", adapter)
        ours, theirs = generate(local).images, generate(omni).images
        assert off(theirs, others[at]) > 0.1
        assert off(theirs, ours) < off(theirs, others[at]) / 10
    omni.set_adapter("bf16", None)
    assert torch.equal(generate(omni).images, plain)


def test_an_adapter_that_binds_nothing_is_refused(omni: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    omni.set_adapter("bf16", versioned(omni, 1))
    before = generate(omni).images
    manager = fake_vllm_omni.DiffusionEngine.last.worker.lora_manager
    monkeypatch.setattr(manager, "slices", {})
    for seed in (2, 3):  # more than the engine keeps
        with pytest.raises(AdapterMergeError, match=r"binding is incomplete: unbound modules=.*attn\.to_k"):
            omni.set_adapter("bf16", versioned(omni, seed))
    monkeypatch.undo()
    assert torch.equal(generate(omni).images, before)
    omni.set_adapter("bf16", versioned(omni, 2))
    assert off(generate(omni).images, before) > 0.1


def test_an_adapter_that_overflows_is_refused(omni: Backend) -> None:
    before = generate(omni).images
    with pytest.raises(AdapterMergeError, match="finite in bfloat16"):
        omni.set_adapter("bf16", versioned(omni, 1, 3e38))
    assert torch.equal(generate(omni).images, before)


class Stopped(BaseException):
    """Ends a request."""


@pytest.mark.parametrize(("at", "kind"), [(1, Stopped), (3, Stopped), (3, InterruptedError)])
def test_between_stops_a_request_before_its_next_step(omni: Backend, at: int, kind: type[BaseException]) -> None:
    before = generate(omni).images
    steps: list[int] = []

    def between() -> None:
        steps.append(0)
        if len(steps) == at:
            raise kind

    with pytest.raises(kind):
        generate(omni, between)
    assert len(steps) == at
    engine = fake_vllm_omni.DiffusionEngine.last
    assert not engine.scheduler.requests
    assert torch.equal(generate(omni).images, before)
    assert not engine.states  # the next request has freed the latents of the stopped one


def test_an_error_of_the_engine_ends_one_request(omni: Backend) -> None:
    engine = fake_vllm_omni.DiffusionEngine.last
    engine.fail = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    with pytest.raises(torch.OutOfMemoryError, match=r"2\.00 GiB"):
        generate(omni)
    engine.fail = ValueError("a kernel is missing")
    with pytest.raises(RuntimeError, match=r"vLLM-Omni: .*a kernel is missing"):
        generate(omni)
    assert generate(omni).images.isfinite().all()


def test_fp8_is_labelled_with_its_share_and_a_dead_engine_fails_the_check(patched: pytest.MonkeyPatch) -> None:
    backend = load("vllm-omni", precision="fp8")
    (info,) = backend.capabilities.precisions
    assert info.precision == "fp8"
    assert 0.3 < info.quantized_share < 0.9
    assert f"fp8-partial: {info.quantized_share:.0%}" in info.how
    backend.check()
    backend.close()
    with pytest.raises(RuntimeError, match="dead"):
        backend.check()


@pytest.mark.parametrize(
    ("model", "settings", "said"),
    [
        ("mini-sana", {}, "serves flux, .* models, and this is sana; serve it with --engine solrl"),
        ("mini-flux", {"precision": "nvfp4"}, "quantised before, and this one is BF16; serve it with --engine solrl"),
        ("mini-sd3", {"precision": "fp8"}, "serves sd3 models only in BF16; serve it with .* or at --precision bf16"),
        ("{}/flux.safetensors+mini-flux", {}, "serve single files with --engine solrl"),
        ("mini-flux", {"engine_options": {"paralel_config": {}}}, "got engine option 'paralel_config'"),
        ("mini-flux", {"engine_options": {"max_num_seqs": 4}}, "got engine option 'max_num_seqs'"),
    ],
)
def test_what_it_cannot_do_is_refused(
    patched: pytest.MonkeyPatch, tmp_path: Path, model: str, settings: dict[str, Any], said: str
) -> None:
    (tmp_path / "flux.safetensors").touch()
    with pytest.raises(ValueError, match=said):
        load("vllm-omni", model.format(tmp_path), **settings)


def test_images_of_another_size_are_the_local_ones(patched: pytest.MonkeyPatch) -> None:
    plan = Plan(steps=2, sde=StochasticSteps(kind="flow", eta=0.7, first=0))
    made = []
    for engine in ("solrl", "vllm-omni"):
        backend = load(engine, precision="bf16", height=32, width=96)
        assert (backend.identity.height, backend.identity.width) == (32, 96)
        backend.set_adapter("bf16", None)
        made.append(generate(backend, plan=plan).images)
        backend.close()
    assert made[0].shape[1:] == (3, 32, 96)
    assert off(*made) < CLOSE


@pytest.mark.parametrize("found", [{}, {"vllm": "0.33.0", "vllm-omni": "0.30.0"}])
def test_other_packages_are_refused_and_named_by_doctor(found: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(metadata, "version", version)
    settings = RolloutSettings(engine="vllm-omni", device="cpu")
    row = next(one for one in check(settings) if one.subject == "engine")
    assert (row.state, support.LOCK in row.action) == ("missing", True)
    said = " and ".join(f"{name} {found.get(name, 'no')}" for name in ("vllm", "vllm-omni"))
    with pytest.raises(RuntimeError, match=f"needs vllm 0.30.0 and vllm-omni 0.30.0, and found {said}"):
        VllmOmniBackend(ModelSpec("m", "no-such-model", None), settings)


def test_an_adapter_is_named_as_the_family_names_its_layers(tmp_path: Path) -> None:
    lora_a = torch.ones(2, 8)
    names = [key("blocks.0.attn1.to_out.0") for key in (lora_a_key, lora_b_key)]
    with peft_folder(Adapter(2, 2.0, dict(zip(names, (lora_a, lora_a.T), strict=True))), output="to_out") as folder:
        names = [key("blocks.0.attn1.to_out") for key in (lora_a_key, lora_b_key)]
        assert load_file(folder / "adapter_model.safetensors").keys() == set(names)
        assert json.loads((folder / "adapter_config.json").read_text())["target_modules"] == ["to_out"]


@pytest.mark.parametrize(
    ("device", "before", "within"),
    [("cuda:2", "4,5,6,7", "6,7"), ("cuda:0", "4,5", "4,5"), ("cuda", None, None), ("cuda:1", None, "1,2")],
)
def test_the_engine_begins_with_the_chosen_gpu(
    patched: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch, device: str, before: str | None, within: str | None
) -> None:
    from solrl_rollout.engine.backends.vllm_omni.engine import _first_visible

    name = "CUDA_VISIBLE_DEVICES"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with _first_visible(torch.device(device)):
        assert os.environ.get(name) == within
    assert os.environ.get(name) == before


def test_a_checkpoint_with_other_weights_is_refused(tmp_path: Path, local: Backend) -> None:
    from solrl_core.families.load import model_folder
    from solrl_core.families.skeleton import load_skeleton

    skeleton = load_skeleton(MODEL)
    (source,) = (model_folder(MODEL) / "transformer").glob("*.safetensors")
    weights = load_file(source)
    cpu = torch.device("cpu")

    def digest() -> str:
        save_file(weights, tmp_path / source.name)
        return checkpoint_digest(skeleton.transformer, tmp_path, cpu)

    assert digest() == local.identity.digests["transformer"]
    name = next(iter(weights))
    weights[name] = weights[name] + 1
    assert digest() != local.identity.digests["transformer"]
    weights["extra"] = torch.zeros(1)
    with pytest.raises(ValueError, match="differ by 1 weights, such as extra"):
        digest()
