"""Network interface between the ranks."""

import fcntl
import os
import socket

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the name of the interface that gloo uses."""
_SIOCGIFADDR = 0x8915
"""Linux's request for an interface's IPv4 address; other systems answer with an error."""
_REQUEST_BYTES = 40
"""Size of its argument, `struct ifreq`."""
_ADDRESS = slice(20, 24)
"""Place of the address in it."""


def choose_interface(address: str) -> None:
    """Have gloo use the interface towards an address of rank 0's machine, unless its variable names another.

    By default gloo uses the address of the machine's host name. On many machines that is loopback, where ranks of other
    machines cannot reach it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing
        except OSError:  # not an IPv4 address
            return
        own = probe.getsockname()[0]
    name = interface_of(own)
    if name is not None:
        os.environ.setdefault(GLOO_INTERFACE, name)


def interface_of(address: str) -> str | None:
    """Name of the interface with an IPv4 address; None for loopback, and for an address that no interface has."""
    if address.startswith("127."):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, name.encode().ljust(_REQUEST_BYTES, b"\0"))
            except OSError:  # an interface without an address
                continue
            if answer[_ADDRESS] == socket.inet_aton(address):
                return name
    return None
