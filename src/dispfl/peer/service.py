"""Tells systemd how a node is doing, if systemd has started it: the protocol of sd_notify(3).

A unit with `Type=notify` gives the process a datagram socket. The node sends READY=1 once it
accepts connections, a line of status whenever it changes, WATCHDOG=1 from its event loop while that
is alive, and STOPPING=1 at the end.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass

from dispfl.peer.status import NodeStatus
from dispfl.peer.transport.https import HttpsTransport

STATUS_INTERVAL = 1.0
"""Seconds between two messages, or less if the watchdog needs it."""


@dataclass(frozen=True)
class ServiceManager:
    """The service manager's socket; without an address, nothing is sent."""

    address: str = ""
    watchdog: float | None = None
    """Seconds without a sign of life after which the service manager ends the process."""

    @classmethod
    def of_process(cls, environment: MutableMapping[str, str] = os.environ) -> "ServiceManager":
        """Take the service manager's variables out of the environment: they are for this process
        alone."""
        address = environment.pop("NOTIFY_SOCKET", "")
        micros, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        if address.startswith("@"):  # a socket without a file
            address = "\0" + address[1:]
        watched = micros.isdecimal() and int(micros) > 0 and pid in ("", str(os.getpid()))
        return cls(address, int(micros) / 1e6 if watched else None)

    def send(self, *lines: str) -> None:
        """Send a message, without waiting; a service manager that does not listen is none of the
        node's concern."""
        if self.address:
            with (
                contextlib.suppress(OSError),
                socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out,
            ):
                out.setblocking(False)
                out.sendto("\n".join(lines).encode(), self.address)

    async def watch(self, status: NodeStatus, transport: HttpsTransport) -> None:
        """Report until cancelled."""
        is_ready, said = False, ""
        try:
            while self.address:
                lines = []
                if transport.is_serving and not is_ready:
                    is_ready, lines = True, ["READY=1"]
                if self.watchdog:
                    lines.append("WATCHDOG=1")
                if (line := status.line) != said:
                    said, lines = line, [*lines, f"STATUS={line}"]
                if lines:
                    self.send(*lines)
                await asyncio.sleep(min(STATUS_INTERVAL, (self.watchdog or STATUS_INTERVAL) / 2))
        finally:
            self.send("STOPPING=1")
