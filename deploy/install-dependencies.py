"""Installs the dependencies of pyproject.toml into the running environment, keeping the base image's PyTorch.

Runs during an image build. If the base image includes PyTorch (NVIDIA's does, built with its own Transformer Engine),
pip must neither replace it nor install a second one. Otherwise `--torch` names the build to install.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

KEPT = ("torch", "torchvision", "triton", "pytorch-triton")
"""Packages that belong together, pinned to their installed versions while the others are installed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--torch", default="", help="PyTorch requirement to install first; empty keeps that of the base image"
    )
    parser.add_argument("--torch-index", default="", help="additional package index for it")
    parser.add_argument("--extras", default="", help="extras whose requirements are installed, too, by commas")
    parser.add_argument("--pyproject", type=Path, default=Path("pyproject.toml"))
    arguments = parser.parse_args()

    project = tomllib.loads(arguments.pyproject.read_text())["project"]
    extras = [extra for extra in arguments.extras.split(",") if extra]
    optional = project["optional-dependencies"]
    if unknown := [extra for extra in extras if extra not in optional]:
        sys.exit(f"got the extras {unknown}; expected some of {sorted(optional)}")
    dependencies = [*project["dependencies"], *(line for extra in extras for line in optional[extra])]
    torch_requirements = [requirement for requirement in dependencies if name_of(requirement) == "torch"]
    if arguments.torch:
        index = ["--extra-index-url", arguments.torch_index] if arguments.torch_index else []
        pip("install", arguments.torch, *index)
    before = installed()
    if "torch" not in before:
        sys.exit("the base image has no PyTorch: choose another BASE, or give --build-arg TORCH=torch==2.13.0")
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".txt") as constraints:
        constraints.writelines(f"{name}=={version}\n" for name, (version, _) in before.items())
        constraints.flush()
        pip("install", *(set(dependencies) - set(torch_requirements)), constraints=constraints.name)
    after = installed()
    if after != before:
        sys.exit(f"pip changed packages of the base image: got {after}; expected {before}")

    from packaging.requirements import Requirement

    version, place = before["torch"]
    for requirement in torch_requirements:
        if not Requirement(requirement).specifier.contains(version, prereleases=True):
            sys.exit(f"the base image has PyTorch {version}; expected {requirement}: choose a newer BASE")
    print(f"PyTorch {version} at {place}, {'newly installed' if arguments.torch else 'from the base image'}")


def name_of(requirement: str) -> str:
    """Project name of a requirement, in lower case."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()


def installed() -> dict[str, tuple[str, str]]:
    """Version and location of each installed package in KEPT."""
    versions = {}
    for name in KEPT:
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        versions[name] = (package.version, str(package.locate_file("")))
    return versions


def pip(*arguments: str, constraints: str = "") -> None:
    """Run pip without the base image's constraints, which pin its whole Python environment."""
    command = [sys.executable, "-m", "pip", *arguments]
    if subprocess.run(command, env=os.environ | {"PIP_CONSTRAINT": constraints}).returncode:
        sys.exit(f"failed: {' '.join(command)}")


if __name__ == "__main__":
    main()
