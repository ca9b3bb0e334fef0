"""What a site remembers of outboxes across restarts: `outbox.json` in its run folder.

serial      of its own head, which never goes back, also if the clock does
models      that lie in its outbox, with their keys
garbage     objects that are to be deleted there
seen        the newest serial of each member's head: an older head is a replayed one
"""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dispfl.files import read_regular, write_atomically
from dispfl.peer.outbox.head import StoredModel

STATE = "outbox.json"


@dataclass
class OutboxState:
    """The content of the file, and changes of it."""

    file: Path
    serial: int = 0
    models: dict[int, StoredModel] = field(default_factory=dict)
    garbage: list[str] = field(default_factory=list)
    """Written before an object is stored, so that a crash leaves nothing behind for ever."""
    seen: dict[str, int] = field(default_factory=dict)

    @classmethod
    def load(cls, run_folder: Path) -> "OutboxState":
        """Read the file; begin anew if there is none, or if it is damaged.

        Then objects of earlier runs stay in the outbox, and the clock makes serials increase.
        """
        state = cls(run_folder / STATE)
        try:
            fields = json.loads(read_regular(state.file))
            models = [StoredModel.parse(entry) for entry in fields["models"]]
            state.serial = int(fields["serial"])
            state.models = {model.round: model for model in models}
            state.garbage = list(map(str, fields["garbage"]))
            state.seen = {str(name): int(serial) for name, serial in fields["seen"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return cls(state.file)
        return state

    def save(self) -> None:
        """Write the file."""
        content = {
            "serial": self.serial,
            "models": [asdict(model) for model in self.models.values()],
            "garbage": self.garbage,
            "seen": self.seen,
        }
        write_atomically(self.file, json.dumps(content).encode())

    def next_serial(self) -> int:
        """The serial of the next head: by the clock, unless that is behind."""
        self.serial = max(self.serial + 1, int(1000 * time.time()))
        return self.serial
