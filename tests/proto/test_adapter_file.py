"""An adapter file is hashed once."""

import hashlib
from types import SimpleNamespace

import pytest
from solrl_proto import adapters
from solrl_proto.adapters import AdapterFile, adapter_digest


def test_the_digest_is_of_the_bytes_and_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []

    def sha256(body: bytes) -> object:
        hashed.append(bytes(body))
        return hashlib.sha256(body)

    monkeypatch.setattr(adapters, "hashlib", SimpleNamespace(sha256=sha256))
    file = AdapterFile(b"abc")
    assert (
        adapter_digest(file) == file.digest == adapter_digest(b"abc") == f"sha256:{hashlib.sha256(b'abc').hexdigest()}"
    )
    assert hashed == [b"abc", b"abc"]
    assert (file, len(file), file[1:]) == (b"abc", 3, b"bc")
