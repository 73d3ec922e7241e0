"""The folder of a run, runs/NAME/: where everything of it lies.

run.toml              the resolved configuration
metrics.jsonl         one line a step, and one an evaluation
summary.json          the end of it, format 1
logs/SERVICE.log
journal/00000001.log  what happened to the buffer, and the trajectories; further ones as they fill up
checkpoints/step-00000040/   a model folder that transformers loads
services/SERVICE.json        address, pid and host of a running service
services/SERVICE.lock        held while it runs; its pid
services/device-HOST-DEVICE.lock   held by who has the device that trainer and engines share
trainer.epoch                how often a trainer was started: older ones are refused
weights/                     the newest version, with the transport "disk"
replay/1/                    what a replay of it made
previous/1/                  what an earlier run of the same name left
"""

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from async_rl.config.schema import Config
from async_rl.errors import UserError

RESULTS = ("metrics.jsonl", "summary.json", "checkpoints", "journal", "replay")
"""What a run leaves, and the next one of its name does not go on with."""


class RunDir:
    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.journal = self.path / "journal"
        self.metrics = self.path / "metrics.jsonl"
        self.summary = self.path / "summary.json"
        self.config = self.path / "run.toml"
        self._services = self.path / "services"
        self._epoch = self.path / "trainer.epoch"

    @property
    def complete(self) -> bool:
        """The run has its summary: it is over."""
        return self.summary.exists()

    @property
    def unfinished(self) -> bool:
        """A run is there that can go on."""
        return not self.complete and (_has_content(self.journal) or _has_content(self.checkpoints))

    @classmethod
    def of(cls, config: Config) -> "RunDir":
        return cls(Path(config.runs) / config.name)

    def create(self) -> None:
        try:
            for folder in (self.path, self.logs, self.checkpoints, self._services):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be made: {error.strerror}") from None

    @contextlib.contextmanager
    def claim(self, service: str) -> Iterator[None]:
        """Hold `service` of this run for this process; UserError while another process does."""
        with (self._services / f"{service}.lock").open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.seek(0)
                raise UserError(
                    f"{self.path}: its {service} is running already (pid {lock.read()}); "
                    "stop it, or give this run another name"
                ) from None
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield

    def set_aside_previous(self, names: Sequence[str] = RESULTS) -> Path | None:
        """Move what an earlier run of this name left into previous/N/, and tell where; None if there is nothing."""
        left = [self.path / name for name in names if _has_content(self.path / name)]
        if not left:
            return None
        target = _next_number(self.path / "previous")
        for path in left:
            path.rename(target / path.name)
        self.create()
        return target

    def set_aside_complete(self) -> None:
        """Move a run that is over into previous/N/, unless its trainer or buffer is still there to end it. Services
        that start together do it once, before any of them looks at what is there."""
        with (self._services / "set-aside.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # for as long as a few names take to change
            if self.complete and not any(self.running(service) for service in ("trainer", "buffer")):
                self.set_aside_previous()

    def device_lock(self, device: str) -> Path:
        return self._services / f"device-{device}.lock"

    def next_replay(self) -> Path:
        """A new folder replay/N."""
        return _next_number(self.path / "replay")

    def announce(self, service: str, address: str) -> None:
        """Tell the other services of this run where `service` is."""
        record = {"address": address, "pid": os.getpid(), "host": here()}
        write_atomically(self._services / f"{service}.json", json.dumps(record))

    def withdraw(self, service: str) -> None:
        """Take the announcement back, unless a successor has announced itself since."""
        if self.pid(service) == os.getpid():
            (self._services / f"{service}.json").unlink(missing_ok=True)

    def address(self, service: str) -> str | None:
        """Where `service` said it is; None where nobody has."""
        address = self._record(service).get("address")
        return address if isinstance(address, str) else None

    def host(self, service: str) -> str | None:
        """The host that `service` runs on; None where nobody has announced it."""
        host = self._record(service).get("host")
        return host if isinstance(host, str) else None

    def pid(self, service: str) -> int | None:
        pid = self._record(service).get("pid")
        return pid if isinstance(pid, int) else None

    def running(self, service: str) -> bool:
        """Whether the process that announced `service` lives: its pid does, and the lock is held."""
        pid = self.pid(service)
        if pid is None or not _alive(pid):
            return False
        with (self._services / f"{service}.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
        return False

    def next_trainer_epoch(self) -> int:
        """A number higher than any trainer of this run had: older ones are fenced out by theirs."""
        epoch = self.trainer_epoch() + 1
        write_atomically(self._epoch, f"{epoch}\n")
        return epoch

    def trainer_epoch(self) -> int:
        """The epoch of the trainer that was started last; 0 before the first."""
        return int(self._epoch.read_text(encoding="utf-8")) if self._epoch.exists() else 0

    def services(self) -> list[str]:
        """Names of the announced services."""
        return sorted(path.stem for path in self._services.glob("*.json"))

    def _record(self, service: str) -> dict[str, object]:
        try:
            record = json.loads((self._services / f"{service}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}


def here() -> str:
    """The name of this host."""
    return socket.gethostname()


def _has_content(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is somebody else's
        return True
    return True


def _next_number(place: Path) -> Path:
    """A new folder in `place`, named by the next number; two processes may ask at the same time."""
    number = 1 + max((int(p.name) for p in place.glob("*") if p.name.isdigit()), default=0)
    while True:
        try:
            (place / str(number)).mkdir(parents=True)
            return place / str(number)
        except FileExistsError:
            number += 1


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the old text or the new one, never a part."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def make_durable(path: Path) -> None:
    """What was written to a file, or which files are in a folder, survives a power failure once this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
