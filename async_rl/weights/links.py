"""Process groups of two between a rank of the trainer and a relay, apart from every other group: over a store that the
leading rank hosts, kept from publication to publication.

A member that dies breaks its group for good and no other one; what was under way ends after `weight_sync.operation_s`.
The next generation, over the same store, is a new group.
"""

import contextlib
import datetime
import ipaddress
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed

from async_rl.errors import PublicationError
from async_rl.protocol.weight_sync import Links

dist: Any = torch.distributed  # whose stubs leave out what is used here
RANK, RELAY = 0, 1  # in a group
FIRST = 4  # times weight_sync.operation_s that a relay which is ready waits for a rank: others may not be ready yet


class Hub:
    """The store at which the groups meet, in the process of the leading rank, at one of its addresses alone.
    port: 0 for a free one."""

    def __init__(self, host: str, port: int = 0) -> None:
        listening = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024
        )
        self.host, self.port = host, int(listening.getsockname()[1])
        self.store = dist.TCPStore(
            host,
            self.port,
            None,
            True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),  # by itself it would listen on every interface
        )


class Groups:
    """The groups of one process. side: RANK or RELAY."""

    def __init__(self, side: int) -> None:
        self._side = side
        self._groups: dict[tuple[int, str], tuple[Links, Any]] = {}

    def channel(self, links: Links, rank: int, relay: str) -> "Channel":
        """To `relay`, or on a relay to `rank`: the group there was, or a new one where `links` are another generation.

        Raises PublicationError where the other side does not come within `links.operation_s`.
        """
        known = self._groups.pop((rank, relay), None)
        if known is None or known[0] != links:
            del known  # the connections of a broken group are closed before the next one is made
            known = links, self._form(links, rank, relay)
        self._groups[rank, relay] = known
        return Channel(known[1], self._side, links.operation_s)

    def _form(self, links: Links, rank: int, relay: str) -> Any:
        timeout = datetime.timedelta(seconds=links.operation_s * (FIRST if self._side == RELAY else 1))
        with told("formed no group", links.operation_s):
            store = dist.TCPStore(links.host, links.port, None, False, timeout, wait_for_workers=False)
            name = f"wsync/{links.generation}/{relay}/{rank}/"
            form = BACKENDS[links.device.partition(":")[0]]
            return form(dist.PrefixStore(name, store), self._side, timeout, links.host, name)


class Channel:
    """One group. `put` and `get` begin; the function that they return waits until it is done."""

    def __init__(self, group: Any, side: int, operation_s: float) -> None:
        self._group, self._peer, self._operation_s = group, 1 - side, operation_s
        self._timeout = datetime.timedelta(seconds=operation_s)
        self._begun = side == RANK

    def put(self, data: torch.Tensor) -> Callable[[], None]:
        with told("sent nothing", self._operation_s):
            return self._waiting(self._group.send([data], self._peer, 0))

    def get(self, into: torch.Tensor) -> Callable[[], None]:
        with told("received nothing", self._operation_s):
            return self._waiting(self._group.recv([into], self._peer, 0))

    def _waiting(self, work: Any) -> Callable[[], None]:
        def wait() -> None:
            with told("the other side is gone or silent", self._operation_s):
                work.wait(self._timeout if self._begun else FIRST * self._timeout)
            self._begun = True

        return wait


@contextlib.contextmanager
def told(what: str, operation_s: float) -> Iterator[None]:
    """The libraries' errors as one line."""
    try:
        yield
    except RuntimeError as error:
        reason = re.sub(r"^\[[^]]*\]\s*", "", str(error).splitlines()[0] if str(error) else type(error).__name__)
        raise PublicationError(f"{what} (weight_sync.operation_s = {operation_s:g}): {reason[:200]}") from None


def _gloo(store: Any, side: int, timeout: datetime.timedelta, host: str, _: str) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(host))]
    return dist.ProcessGroupGloo(store, side, 2, options)


def _nccl(store: Any, side: int, timeout: datetime.timedelta, _: str, __: str) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, side, 2, options)


def _hccl(store: Any, side: int, timeout: datetime.timedelta, _: str, name: str) -> Any:
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    options = ProcessGroupHCCL.Options()
    options._timeout = timeout
    options.global_ranks_in_group = []
    options.group_id = name
    group = ProcessGroupHCCL(store, side, 2, options)
    group._set_sequence_number_for_group()
    return group


BACKENDS: dict[str, Callable[[Any, int, datetime.timedelta, str, str], Any]] = {
    "cpu": _gloo,
    "cuda": _nccl,
    "npu": _hccl,
}


def address_towards(host: str) -> str:
    """The address of this machine from which `host` is reached: loopback towards loopback."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def hub_address(peers: list[str]) -> str:
    """Where the store listens, so that each of `peers` (tcp://HOST:PORT, host:port) reaches it and nobody else needs
    to: loopback while all of them are here."""
    for peer in peers:
        host = peer.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        if host and not _is_loopback(host):
            return address_towards(host)
    return "127.0.0.1"


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
