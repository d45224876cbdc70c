"""The call surface that the vLLM-Omni backend and its fake engine use exists in the wheels of the accepted versions.

`scripts/install-test-tools` downloads vllm-omni's wheel (6 MB). vllm's (300 MB) is compared, too, if it lies beside it.
"""

import ast
import inspect
import os
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from solrl_rollout.engine.backends.vllm_omni import support
from tests.services import fake_vllm_omni

WHEELS = Path(os.environ.get("SOLRL_TEST_WHEELS", Path.home() / ".cache" / "solrl" / "wheels"))
USED = [(module, one) for module, found in fake_vllm_omni.SURFACE.items() for one in found]
OURS = {
    # Attributes and methods beyond the fake's own that the backend touches or that decide what it may rely on.
    "vllm_omni.diffusion.worker.diffusion_worker": {
        "DiffusionWorker": ["execute_stepwise", "remove_lora", "init_lora_manager"],
        "CustomPipelineWorkerExtension": ["re_init_pipeline"],
    },
    "vllm_omni.diffusion.lora.manager": {"DiffusionLoRAManager": ["set_active_adapter", "remove_adapter"]},
    "vllm_omni.diffusion.executor.multiproc_executor": {
        "MultiprocDiffusionExecutor": ["check_health", "collective_rpc", "shutdown"]
    },
}


@cache
def wheel(package: str) -> zipfile.ZipFile:
    name, version = package.replace("_", "-"), support.VERSIONS[package.replace("_", "-")]
    found = sorted(WHEELS.glob(f"{package}-{version}-*.whl"))
    if not found:
        pytest.skip(f"no wheel of {name} {version} in {WHEELS}: scripts/install-test-tools downloads vllm-omni's")
    return zipfile.ZipFile(found[0])


@cache
def tree(module: str) -> ast.Module:
    sources = wheel(module.partition(".")[0])
    path = module.replace(".", "/")
    names = set(sources.namelist())
    name = f"{path}.py" if f"{path}.py" in names else f"{path}/__init__.py"
    assert name in names, f"{module} is not in the wheel"
    return ast.parse(sources.read(name))


def found(module: str, name: str) -> tuple[str, ast.ClassDef | ast.FunctionDef]:
    """A class or function of a module and the module that defines it, through its imports."""
    for node in tree(module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and any((one.asname or one.name) == name for one in node.names):
            base = ".".join(module.split(".")[: -node.level]) + "." if node.level else ""
            return found(base + (node.module or ""), name)
    raise AssertionError(f"{module} has no {name}")


def members(module: str, name: str) -> Iterator[ast.stmt]:
    """Statements of a class and its base classes."""
    where, node = found(module, name)
    assert isinstance(node, ast.ClassDef)
    yield from node.body
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id not in ("ABC", "Protocol", "Enum"):
            yield from members(where, base.id)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


def methods(module: str, name: str) -> dict[str, ast.FunctionDef]:
    """The first of each name, as Python resolves it."""
    functions = [node for node in members(module, name) if isinstance(node, ast.FunctionDef)]
    return {node.name: node for node in reversed(functions)}


def variables(module: str, name: str) -> set[str]:
    """Fields of a dataclass, or members of an enumeration."""
    assigned = [node for node in members(module, name) if isinstance(node, ast.AnnAssign | ast.Assign)]
    targets = [target for node in assigned for target in getattr(node, "targets", None) or [node.target]]
    return {target.id for target in targets if isinstance(target, ast.Name)}


@pytest.mark.parametrize(("module", "one"), USED, ids=lambda one: getattr(one, "__name__", one))
def test_the_fake_has_only_what_the_wheel_has(module: str, one: Any) -> None:
    _, node = found(module, one.__name__)
    if isinstance(node, ast.FunctionDef):
        assert set(inspect.signature(one).parameters) <= set(parameters(node))
        return
    fields = getattr(one, "__dataclass_fields__", None) or getattr(one, "__members__", {})
    assert set(fields) <= variables(module, one.__name__)
    # A worker's calls are those of the class that the extension is mixed into. The fake engine is its own executor.
    mixed = methods(module, "DiffusionWorker") if one.__name__ == "CustomPipelineWorkerExtension" else {}
    theirs = methods(module, one.__name__) | mixed
    for name, own in vars(one).items():
        if not inspect.isfunction(own) or fields or name == "check_health" or (name[0] == "_" and name != "__init__"):
            continue
        asked = set(inspect.signature(own).parameters) - {"config"}
        assert name in theirs, f"{one.__name__}.{name}"
        assert theirs[name].args.kwarg or asked <= set(parameters(theirs[name])), f"{one.__name__}.{name}"


@pytest.mark.parametrize("module", OURS)
def test_what_the_backend_relies_on_exists(module: str) -> None:
    for name, needed in OURS[module].items():
        assert set(needed) <= set(methods(module, name)), name


@pytest.mark.parametrize("name", ["prepare_encode", "denoise_step", "step_scheduler", "post_decode"])
def test_the_pipeline_takes_what_the_runner_gives(name: str) -> None:
    path = Path(support.__file__).with_name("pipeline.py")
    (ours,) = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    theirs = methods("vllm_omni.diffusion.models.interface", "SupportsStepExecution")[name]
    assert parameters(ours) == parameters(theirs)


@pytest.mark.parametrize(
    ("family", "arguments"),
    {
        "flux": "hidden_states encoder_hidden_states pooled_projections timestep guidance img_ids txt_ids return_dict",
        "sd3": "hidden_states encoder_hidden_states pooled_projections timestep return_dict",
        "flux2-klein": "hidden_states encoder_hidden_states timestep img_ids txt_ids return_dict",
        "wan": "hidden_states timestep encoder_hidden_states return_dict",
    }.items(),
)
def test_the_transformers_take_what_the_families_give(family: str, arguments: str) -> None:
    module, _, name = support.FAMILIES[family].transformer.partition(":")
    theirs = methods(f"vllm_omni.diffusion.models.{module}", name)
    assert set(arguments.split()) <= set(parameters(theirs["forward"]))
    assert "load_weights" in theirs


def test_an_aborted_request_leaves_the_worker_and_the_engine_goes_on() -> None:
    """An empty step would leave its state in the worker, and an `Exception` before a step ends the engine."""
    schedule = ast.unparse(methods("vllm_omni.diffusion.sched.base_scheduler", "BaseScheduler")["schedule"])
    assert "finished_req_ids=set(self._finished_req_ids)" in schedule
    wait = methods("vllm_omni.diffusion.diffusion_engine", "DiffusionEngine")["add_req_and_wait_for_response"]
    tries = [node for node in ast.walk(wait) if isinstance(node, ast.Try)]
    (around,) = [node for node in tries if "self.scheduler.schedule()" in ast.unparse(node.body)]
    assert [ast.unparse(one.type) for one in around.handlers if one.type] == ["Exception"]
