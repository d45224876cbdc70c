"""Network interface between the ranks."""

import fcntl
import ipaddress
import os
import socket

from solrl_trainer.ranks.connections import Connections

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the name of the interface that gloo uses."""
_SIOCGIFADDR = 0x8915
"""Linux's request for an interface's IPv4 address; other systems answer with an error."""
_REQUEST_BYTES = 40
"""Size of its argument, `struct ifreq`."""
_ADDRESS = slice(20, 24)
"""Place of the address in it."""


def choose_interface(connections: Connections) -> None:
    """Have gloo use the interface of the connections between the ranks, unless its variable names another.

    By default gloo uses the address of the machine's host name. On many machines that is loopback, where ranks of other
    machines cannot reach it.
    """
    for connection in connections.values():
        name = interface_of(connection.getsockname()[0])
        if name is not None:
            os.environ.setdefault(GLOO_INTERFACE, name)
            return


def interface_of(address: str) -> str | None:
    """Name of the interface with an IPv4 address, which may be written `::ffff:10.0.0.1`.

    Returns:
        None for loopback, other IPv6 addresses, and addresses that no interface has.
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        found = found.ipv4_mapped or found
    if found.version != 4 or found.is_loopback:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, name.encode().ljust(_REQUEST_BYTES, b"\0"))
            except OSError:  # an interface without an address
                continue
            if answer[_ADDRESS] == found.packed:
                return name
    return None
