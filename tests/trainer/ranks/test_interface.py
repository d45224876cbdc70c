"""The network interface that gloo uses: that towards rank 0."""

import os
import socket

import pytest
from solrl_trainer.ranks.rank_runtime import GLOO_INTERFACE, choose_interface, interface_of

ELSEWHERE = "192.0.2.1"
"""An address for documentation (RFC 5737); nothing is sent there."""


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO_INTERFACE, "")
    monkeypatch.delenv(GLOO_INTERFACE)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", ELSEWHERE])
def test_loopback_and_unknown_addresses_have_none(address: str) -> None:
    assert interface_of(address) is None


def test_gloo_uses_the_interface_towards_rank_0_unless_the_user_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        try:
            found.connect((ELSEWHERE, 9))
        except OSError:
            pytest.skip("this machine has no network")
        name = interface_of(found.getsockname()[0])
    assert name in [own for _, own in socket.if_nameindex()]
    choose_interface(ELSEWHERE)
    assert os.environ[GLOO_INTERFACE] == name
    monkeypatch.setenv(GLOO_INTERFACE, "mine")
    choose_interface(ELSEWHERE)
    assert os.environ[GLOO_INTERFACE] == "mine"


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_gloo_chooses_on_one_machine(address: str) -> None:
    choose_interface(address)
    assert GLOO_INTERFACE not in os.environ
