"""Names, versions, seeds and digests: what each pattern takes and refuses."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from solrl_proto.identifiers import Digest, Message, ModelName, RunName, Seed, TenantName, Version, default_model_name
from solrl_proto.models import NoiseContract


@pytest.mark.parametrize("kind", [RunName, ModelName, TenantName])
def test_names(kind: Any) -> None:
    names = TypeAdapter(kind)
    for good in ("a", "7", "flux1-dev", "a.b_c-d", "x" * 64):
        assert names.validate_python(good) == good
    for bad in ("", "A", "-a", "a-", ".a", "a/b", "a b", "ä", "a\n", "x" * 65):
        with pytest.raises(ValidationError):
            names.validate_python(bad)


@pytest.mark.parametrize("kind", [Version, Seed])
def test_versions_and_seeds_are_exact_in_a_json_double(kind: Any) -> None:
    numbers = TypeAdapter(kind)
    assert numbers.validate_python(0) == 0
    assert numbers.validate_python(2**53 - 1) == int(float(2**53 - 1))
    for bad in (-1, 2**53, 0.5):
        with pytest.raises(ValidationError):
            numbers.validate_python(bad)


def test_digests() -> None:
    digests = TypeAdapter(Digest)
    assert digests.validate_python("sha256:" + "0a" * 32)
    for bad in ("0a" * 32, "sha256:" + "0A" * 32, "sha256:" + "0a" * 31, "sha256:" + "0g" * 32):
        with pytest.raises(ValidationError):
            digests.validate_python(bad)


def test_messages_are_immutable_and_know_all_their_fields() -> None:
    message = NoiseContract(version=1, probe=(0.5,))
    with pytest.raises(ValidationError, match="frozen"):
        message.version = 2  # type: ignore[misc]
    with pytest.raises(ValidationError, match="Extra inputs"):
        NoiseContract(version=1, probe=(), more=1)  # type: ignore[call-arg]
    assert issubclass(NoiseContract, Message)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("mini-sana", "mini-sana"),
        ("black-forest-labs/FLUX.1-dev", "flux.1-dev"),
        ("/models/My Model/", "my-model"),
        ("./runs/_best_", "best"),
        ("///", "model"),
        ("/files/FLUX1-dev.safetensors+/models/FLUX.1-dev", "flux1-dev"),
        ("FLUX.1-dev/flux1-dev.safetensors", "flux1-dev"),
        ("x" * 99, "x" * 64),
    ],
)
def test_a_model_is_called_by_the_last_part_of_its_place(model: str, name: str) -> None:
    assert default_model_name(model) == name
    assert TypeAdapter(ModelName).validate_python(name) == name
