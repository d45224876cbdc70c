"""The distribution solrl-client: it works without torch, and its files are those of solrl."""

import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from importlib.util import find_spec
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "clients/python"
IMPORT_ALL = """
import importlib, pkgutil, sys

wheel, packages, *absent = sys.argv[1:]
sys.path[:0] = [wheel, packages]
sys.modules.update(dict.fromkeys(absent))  # importing one of these fails
import solrl_client, solrl_proto

for package in (solrl_client, solrl_proto):
    assert package.__path__ == [f"{wheel}/{package.__name__}"], package.__path__
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        try:
            importlib.import_module(found.name)
            print(found.name)
        except ModuleNotFoundError as error:
            print(found.name, "needs", error.name)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    (built,) = WheelBuilder(str(FOLDER)).build(directory=str(folder), versions=["standard"])
    return Path(built)


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as file:
        return [name for name in file.namelist() if ".dist-info/" not in name]


def test_it_is_imported_where_nothing_else_of_solrl_nor_torch_is(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    spec = find_spec("pydantic")
    assert spec is not None
    packages = str(Path(spec.origin or "").parents[1])
    # Without site, which would add the tree itself.
    command = [sys.executable, "-I", "-S", "-c", IMPORT_ALL, str(tmp_path), packages, "torch", "numpy", "safetensors"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    needy = [line for line in done.stdout.splitlines() if " needs " in line]
    assert needy == ["solrl_client.adapter_file needs numpy", "solrl_client.noise needs numpy"]
    assert len(done.stdout.splitlines()) == len([n for n in names(wheel) if n.endswith(".py") and "__init__" not in n])


def test_both_distributions_have_the_same_files(wheel: Path) -> None:
    builder = WheelBuilder(str(ROOT))
    ours = {file.distribution_path: Path(file.path) for file in builder.recurse_included_files()}
    shared = [name for name in ours if name.startswith(("solrl_client/", "solrl_proto/"))]
    assert sorted(names(wheel)) == sorted(shared)
    with zipfile.ZipFile(wheel) as file:
        assert [name for name in shared if file.read(name) != ours[name].read_bytes()] == []


def test_it_needs_nothing_but_httpx_and_pydantic_of_any_later_version(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith("/METADATA"))
        metadata = message_from_bytes(file.read(name))
    solrl = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = metadata.get_all("Requires-Dist")
    assert needed == ["httpx>=0.25", "pydantic>=2.12", "numpy>=1.26; extra == 'numpy'"]
    assert (metadata["Version"], metadata["Requires-Python"]) == (solrl["version"], solrl["requires-python"])
