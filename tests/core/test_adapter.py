"""The adapter file: encoding and decoding are inverse, and any invalid file is refused with a specific kind."""

import struct
from typing import Any

import pytest
import safetensors.torch
import torch
from solrl_core.adapter import MAX_HEADER_BYTES, Adapter, decode_adapter, encode_adapter
from solrl_core.errors import AdapterError
from solrl_proto.adapters import adapter_digest
from tests.support.adapters import random_adapter

LAYOUT = {"blocks.0.attn.to_q": (6, 4), "blocks.0.ff.proj": (8, 6)}
RANK = 2
A_KEY = "base_model.model.blocks.0.attn.to_q.lora_A.weight"
B_KEY = "base_model.model.blocks.0.attn.to_q.lora_B.weight"
META = {"r": "2", "lora_alpha": "4"}


def tensors() -> dict[str, torch.Tensor]:
    return random_adapter(LAYOUT, seed=0, rank=RANK).tensors


def file_of(changes: dict[str, Any] | None = None, meta: dict[str, str] | None = META) -> bytes:
    """A file by safetensors itself: the good tensors with some replaced, added, or (None) left out."""
    held = {key: value for key, value in (tensors() | (changes or {})).items() if value is not None}
    body: bytes = safetensors.torch.save(held, meta)
    return body


def with_header(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def refusal(body: bytes) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        decode_adapter(body, LAYOUT)
    assert str(caught.value).startswith("Adapter refused: ")
    return caught.value


def test_tensors_are_views_of_the_file_and_aligned_after_any_header() -> None:
    body = encode_adapter(Adapter(RANK, 4.0, tensors()))
    end = 8 + int.from_bytes(body[:8], "little")
    for spaces in range(5):
        file = with_header(body[8:end] + b" " * spaces, body[end:])
        read, again = (decode_adapter(file, LAYOUT).tensors for _ in range(2))
        assert all(torch.equal(read[key], value) and read[key].data_ptr() % 4 == 0 for key, value in tensors().items())
        assert (read[A_KEY].data_ptr() == again[A_KEY].data_ptr()) == (spaces in (0, 4))


def test_same_tensors_give_the_same_bytes_and_come_back() -> None:
    adapter = decode_adapter(encode_adapter(Adapter(RANK, 4.0, tensors())), LAYOUT)
    assert (adapter.rank, adapter.alpha, adapter.scale) == (2, 4.0, 2.0)
    assert adapter.modules == tuple(sorted(LAYOUT))
    assert adapter.tensors.keys() == tensors().keys()
    assert all(torch.equal(adapter.tensors[key], value) for key, value in tensors().items())
    forward = tensors()
    backward = dict(reversed(forward.items()))
    bodies = {encode_adapter(Adapter(RANK, 4.0, made)) for made in [forward, backward] * 10}
    assert len(bodies) == 1
    digest = adapter_digest(bodies.pop())
    assert digest.startswith("sha256:")
    assert len(digest) == len("sha256:") + 64


@pytest.mark.parametrize("alpha", [32, 0.1, 1e-5, 0.00012345678901234567, 1.5e20])
def test_alpha_survives_exactly(alpha: float) -> None:
    assert decode_adapter(encode_adapter(Adapter(RANK, alpha, tensors())), LAYOUT).alpha == alpha


def test_tensors_are_encoded_by_value_in_float32_alone() -> None:
    flat = torch.arange(20, dtype=torch.float32, requires_grad=True)
    made = tensors() | {A_KEY: flat[:8].view(4, 2).T, B_KEY: flat[8:].view(6, 2)}
    back = decode_adapter(encode_adapter(Adapter(RANK, 4.0, made)), LAYOUT)
    assert torch.equal(back.tensors[A_KEY], made[A_KEY])
    assert torch.equal(back.tensors[B_KEY], made[B_KEY])
    with pytest.raises(AdapterError) as caught:
        encode_adapter(Adapter(RANK, 4.0, tensors() | {A_KEY: torch.zeros(2, 4, dtype=torch.bfloat16)}))
    assert (caught.value.fault, caught.value.where) == ("dtype", A_KEY)


def test_truncated_files_are_malformed_and_flipped_headers_give_an_adapter_or_a_refusal() -> None:
    body = file_of()
    assert {refusal(body[:end]).fault for end in range(len(body))} == {"malformed"}
    body = encode_adapter(Adapter(RANK, 4.0, tensors()))
    (length,) = struct.unpack("<Q", body[:8])
    refused = 0
    for place in range(8 + length):
        for mask in (0x01, 0x20, 0x80):
            flipped = bytearray(body)
            flipped[place] ^= mask
            try:
                decode_adapter(bytes(flipped), LAYOUT)
            except AdapterError:
                refused += 1
    assert refused > length


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"\x80\x04\x95 a pickle, perhaps", struct.pack("<Q", 2**63) + b"{}"),
        struct.pack("<Q", MAX_HEADER_BYTES + 1) + b" " * (MAX_HEADER_BYTES + 1),
        *(with_header(header) for header in (b"[]", b"{" * 100_000, b'{"__metadata__":{"r":2}}')),
        with_header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,800]}}', bytes(8)),
        with_header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(16)),
        with_header(b'{"a":{"dtype":"F32","shape":[3,18446744073709551615],"data_offsets":[0,8]}}', bytes(8)),
    ],
    ids=["empty", "pickle", "length", "long-header", "list", "nested", "meta-type", "offset", "rest", "overflow"],
)
def test_files_that_are_not_safetensors_are_malformed(body: bytes) -> None:
    assert refusal(body).fault == "malformed"


RANKS = (None, "", "0", "-2", "2.0", "nan", " 2", "2_0", "9" * 5000, "²")
ALPHAS = (None, "", "0", "0.0", "-4", "nan", "inf", "1e999", "1e-999", "4_0", "four")


@pytest.mark.parametrize(("name", "value"), [*(("r", rank) for rank in RANKS), *(("lora_alpha", a) for a in ALPHAS)])
def test_metadata_must_be_a_whole_rank_and_a_finite_alpha_above_zero(name: str, value: str | None) -> None:
    problem = refusal(file_of(meta={key: text for key, text in (META | {name: value}).items() if text is not None}))
    assert (problem.fault, problem.where) == ("metadata", f"__metadata__.{name}")
    assert len(str(problem)) < 1000
    assert refusal(file_of(meta=None)).fault == "metadata"


def test_partial_and_empty_adapters_are_refused() -> None:
    problem = refusal(file_of({B_KEY: None}))
    assert (problem.fault, problem.where, problem.expected) == ("keys", B_KEY, [B_KEY])
    assert "1 of the 4 tensors are missing" in problem.detail
    for body in (
        safetensors.torch.save({"transformer.to_q.lora_A.weight": torch.ones(2, 4)}, META),
        with_header(b'{"__metadata__":{"r":"2","lora_alpha":"4"}}'),
    ):
        problem = refusal(body)
        assert problem.fault == "keys"
        assert "binds none of the model's 2" in problem.detail


@pytest.mark.parametrize("shape", [(4, 2), (3, 4), (2, 5), (8,), (2, 4, 1), (0, 4), ()])
def test_a_wrong_shape_is_refused_with_both_shapes(shape: tuple[int, ...]) -> None:
    problem = refusal(file_of({A_KEY: torch.zeros(shape)}))
    assert (problem.fault, problem.where) == ("shape", A_KEY)
    assert (problem.got, problem.expected) == (list(shape), [2, 4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.float8_e4m3fn])
def test_other_types_than_float32_are_refused(dtype: torch.dtype) -> None:
    problem = refusal(file_of({B_KEY: torch.zeros(6, 2, dtype=dtype)}))
    assert (problem.fault, problem.where, problem.expected) == ("dtype", B_KEY, "F32")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_single_value_that_is_not_finite_is_refused(value: float) -> None:
    bad = torch.zeros(6, 2)
    bad[5, 1] = value
    problem = refusal(file_of({B_KEY: bad}))
    assert (problem.fault, problem.where) == ("nonfinite", B_KEY)
    assert problem.got == "1 of 12 values NaN or infinite"
