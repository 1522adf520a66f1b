"""What the local stack remembers between its starts: ports, passwords, keys.

One JSON file of mode 0600 in the data folder. The client and the command read it to find the stack
of this machine and its key.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

STATE_FILE = "state.json"


@dataclass
class ServerState:
    """A database server's port (0: not chosen yet) and password ("": not chosen yet)."""

    port: int = 0
    password: str = field(default="", repr=False)


@dataclass
class ApiState:
    """Where the API listens and the keys made for it: one for people, and one for each node.

    ``database`` tells which database the keys are in, so that keys of another one are not used.
    """

    url: str = ""
    key: str = field(default="", repr=False)
    node_keys: dict[str, str] = field(default_factory=dict, repr=False)
    database: str = ""


@dataclass
class StackState:
    """The whole file."""

    postgres: ServerState = field(default_factory=ServerState)
    valkey: ServerState = field(default_factory=ServerState)
    api: ApiState = field(default_factory=ApiState)

    @classmethod
    def load(cls, data_dir: Path) -> StackState:
        """The remembered state; an empty one when there is none. Errors: ValueError, OSError."""
        path = data_dir / STATE_FILE
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(stored, dict) or not isinstance(stored.get("api"), dict):
                raise ValueError("it does not tell of an API")
            stored["api"].pop("node_key", None)  # all nodes had one key once
            found = cls(
                ServerState(**stored["postgres"]),
                ServerState(**stored["valkey"]),
                ApiState(**stored["api"]),
            )
            found.check()
            return found
        except FileNotFoundError:
            return cls()
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is damaged ({error}); remove it to start afresh.") from None

    def check(self) -> None:
        """Raises ``ValueError`` for values that are none of theirs: damage that is JSON still."""
        for server in (self.postgres, self.valkey):
            if type(server.port) is not int or not 0 <= server.port < 1 << 16:
                raise ValueError("a port is no port")
        words = [self.postgres.password, self.valkey.password]
        words += [self.api.url, self.api.key, self.api.database]
        keys = self.api.node_keys
        if not isinstance(keys, dict):
            raise ValueError("the nodes' keys are none")
        # A server or a command is started with them, or a request made.
        for word in [*words, *keys, *keys.values()]:
            if not isinstance(word, str) or not word.isprintable():
                raise ValueError("a password, an address or a key is no such text")

    def save(self, data_dir: Path) -> None:
        """Replace the file as a whole; only its owner can read it at any moment."""
        descriptor, draft = tempfile.mkstemp(prefix=f".{STATE_FILE}.", dir=data_dir)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(asdict(self), file, indent=2)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, data_dir / STATE_FILE)
        except BaseException:
            os.unlink(draft)
            raise


def default_data_dir() -> Path:
    """$OCTRAIN_DATA_DIR, else octrain below $XDG_DATA_HOME or ~/.local/share."""
    chosen = os.environ.get("OCTRAIN_DATA_DIR")
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser().absolute() / "octrain"
