"""The Dockerfiles, their lock files, and their build context."""

import shutil
import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from proof.compose import load
from solrl_rollout.engine.backends.vllm_omni import support

ROOT = Path(__file__).parents[2]
REWARDS = ROOT / "deploy" / "rewards"
COMPOSE = load(ROOT / "docker-compose.yml", {})["services"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def locked_with_hashes(path: Path) -> dict[str, str]:
    """Version by package of a lock file, each of which must have hashes."""
    blocks = [line for line in path.read_text().replace("\\\n", "").splitlines() if "==" in line]
    assert all(" --hash=sha256:" in block for block in blocks)
    return dict(block.split()[0].split("==") for block in blocks)


def test_the_lock_file_has_hashes_and_the_versions_that_the_backend_accepts() -> None:
    locked = locked_with_hashes(ROOT / support.LOCK)
    assert {name: locked[name] for name in support.VERSIONS} == support.VERSIONS
    assert locked["torch"] == "2.13.0"
    for requirement in map(Requirement, PROJECT):
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement
    command = (ROOT / "deploy" / "lock-vllm-omni").read_text()
    assert all(f"{name}=={version}\n" in command for name, version in support.VERSIONS.items())


def requirements(path: Path) -> list[str]:
    """Requirements of a file, without comments, and without those of files that it includes."""
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("-r")]


def test_the_lock_file_of_image_reward_fits_its_requirements_and_has_hashes() -> None:
    folder = REWARDS / "imagereward"
    locked = locked_with_hashes(folder / "requirements.lock")
    of_service = requirements(REWARDS / "service.in")
    assert set(of_service) < set(PROJECT)
    wanted = requirements(folder / "requirements.in") + of_service
    for requirement in map(Requirement, wanted):
        if requirement.name != "torch":  # of the Dockerfile
            assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement
    assert not locked.keys() & {"torch", "torchvision", "triton"}
    assert "RUN pip install torch==2.14.1 torchvision==0.29.2 " in (folder / "Dockerfile").read_text()


def test_make_secrets_keeps_existing_secrets(tmp_path: Path) -> None:
    script = tmp_path / "deploy" / "make-secrets"
    shutil.copytree(ROOT / "deploy", script.parent)
    folder = tmp_path / "secrets"

    def make(*person: Path, **environment: str) -> dict[str, str]:
        env = {"PATH": "/usr/bin:/bin", **environment}
        subprocess.run([script, *person], check=True, capture_output=True, env=env)
        return {path.name: path.read_text().strip() for path in (*person, folder)[0].iterdir() if path.is_file()}

    first = make()
    password = first["redis_password"]
    assert len(password) == 64
    assert first["redis_url"] == f"redis://:{password}@redis:6379"
    assert (first["hf_token"], first["token"], first[".gitignore"]) == ("", "", "*")
    assert first["reward_token"] == first["judge_token"] == ""
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "redis_password").stat().st_mode & 0o777 == 0o644
    assert make(HF_TOKEN="hf_word") == first | {"hf_token": "hf_word"}
    assert make() == first | {"hf_token": "hf_word"}
    trainers = {entry if isinstance(entry, str) else entry["source"] for entry in COMPOSE["trainer"]["secrets"]}
    alice = make(folder / "alice", HF_TOKEN="hf_alice")
    assert alice.keys() == trainers | {".gitignore"}, "none that opens Redis"
    assert alice["hf_token"] == "hf_alice"
    assert make() == first | {"hf_token": "hf_word"}
