"""Names, versions, seeds and digests: what each pattern takes and refuses."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from solrl_proto.identifiers import Digest, ModelName, RunName, Seed, TenantName, Version
from solrl_proto.model_names import default_model_name


@pytest.mark.parametrize(
    ("kinds", "good", "bad"),
    [
        (
            (RunName, ModelName, TenantName),
            ("a", "7", "flux1-dev", "a.b_c-d", "x" * 64),
            ("", "A", "-a", "a-", ".a", "a/b", "a b", "ä", "a\n", "x" * 65),
        ),
        ((Version, Seed), (0, int(float(2**53 - 1))), (-1, 2**53, 0.5)),
        (
            (Digest,),
            ("sha256:" + "0a" * 32,),
            ("0a" * 32, *(f"sha256:{end}" for end in ("0A" * 32, "0a" * 31, "0g" * 32))),
        ),
    ],
    ids=["names", "numbers", "digests"],
)
def test_what_patterns_take_and_refuse(kinds: Any, good: Any, bad: Any) -> None:
    for kind in map(TypeAdapter, kinds):
        assert [kind.validate_python(one) for one in good] == list(good)
        for one in bad:
            with pytest.raises(ValidationError):
                kind.validate_python(one)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        *(("mini-sana", "mini-sana"), ("black-forest-labs/FLUX.1-dev", "flux.1-dev")),
        *(("/models/My Model/", "my-model"), ("./runs/_best_", "best"), ("///", "model")),
        ("/files/FLUX1-dev.safetensors+/models/FLUX.1-dev", "flux1-dev"),
        ("FLUX.1-dev/flux1-dev.safetensors", "flux1-dev"),
        ("x" * 99, "x" * 64),
    ],
)
def test_a_model_is_called_by_the_last_part_of_its_place(model: str, name: str) -> None:
    assert default_model_name(model) == name
    assert TypeAdapter(ModelName).validate_python(name) == name
