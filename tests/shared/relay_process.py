"""A relay in a process of its own."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from real_peers import until

from dispfl.peer.local_federation import LOOPBACK, free_ports
from dispfl.peer.run_relay import RelaySettings
from dispfl.peer.site import Site

DISPFL = str(Path(sys.executable).with_name("dispfl"))


class RelayProcess:
    """A relay as its operator runs it."""

    def __init__(self, folder: Path, listen: str | None = None, namespace: str = "") -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "members").mkdir()
        self.listen = listen or f"{LOOPBACK}:{free_ports(1)[0]}"
        self._prefix = ["ip", "netns", "exec", namespace] if namespace else []
        self.log = folder / "log.txt"
        settings = RelaySettings(self.listen, [], identity=folder / "identity")
        self.address = str(settings.address())
        self._process: subprocess.Popen[bytes] | None = None

    def admit(self, sites: Sequence[Site]) -> None:
        for site in sites:
            (self.folder / "members" / f"{site.name}.invite").write_text(str(site.invite()))

    def start(self, *more: str) -> None:
        arguments = ["relay", "--listen", self.listen, "--members", str(self.folder / "members")]
        arguments += ["--identity", str(self.folder / "identity"), *more]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._prefix, DISPFL, *arguments], stdout=log, stderr=log
            )
        until(lambda: "listening" in self.log.read_text(), self.log.read_text, pause=0.05)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
