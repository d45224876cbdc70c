"""The network interface that gloo uses: that of the ranks' connections."""

import os
import socket
from collections.abc import Iterator

import pytest
from solrl_trainer.ranks.interface import GLOO_INTERFACE, choose_interface, interface_of

ELSEWHERE = ("192.0.2.1", 9)
"""An address for documentation (RFC 5737); nothing is sent there."""


@pytest.fixture
def outward() -> Iterator[socket.socket]:
    """A socket with this machine's address in its network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        try:
            found.connect(ELSEWHERE)
        except OSError:
            pytest.skip("this machine has no network")
        yield found


@pytest.fixture
def local() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        found.connect(("127.0.0.1", 9))
        yield found


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO_INTERFACE, "")
    monkeypatch.delenv(GLOO_INTERFACE)


def test_an_address_belongs_to_an_interface(outward: socket.socket) -> None:
    address = outward.getsockname()[0]
    name = interface_of(address)
    assert name in [own for _, own in socket.if_nameindex()]
    assert interface_of(f"::ffff:{address}") == name


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1", "fe80::1%eth0", ELSEWHERE[0]])
def test_loopback_and_unknown_addresses_have_none(address: str) -> None:
    assert interface_of(address) is None


def test_gloo_uses_the_interface_between_the_machines(outward: socket.socket, local: socket.socket) -> None:
    choose_interface({1: local, 2: outward})
    assert os.environ[GLOO_INTERFACE] == interface_of(outward.getsockname()[0])


def test_an_interface_that_the_user_names_is_kept(outward: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO_INTERFACE, "mine")
    choose_interface({1: outward})
    assert os.environ[GLOO_INTERFACE] == "mine"


def test_ranks_of_one_machine_leave_the_choice_to_gloo(local: socket.socket) -> None:
    choose_interface({1: local})
    assert GLOO_INTERFACE not in os.environ
