"""A slot: a file in shared memory that holds one version of the weights.

Slots are made once and written again and again: a fresh file costs a page fault for every page and is about
twenty times slower. The file's name carries a hash of the run's folder, so two runs never meet.
"""

import mmap
import os
from pathlib import Path

import xxhash

from async_rl.errors import PublicationError


class Slots:
    """Names of the slots of one relay of the run whose folder is `run`, in `directory` (`weight_sync.directory`).

    relay: "" for the slots of all of them, to remove them.
    """

    def __init__(self, directory: str, run: Path, relay: str = "") -> None:
        self.directory = Path(directory)
        self._prefix = f"async-rl-{xxhash.xxh3_64_hexdigest(str(run.resolve()).encode())}-{relay and relay + '-'}"

    def path(self, index: int) -> str:
        return str(self.directory / f"{self._prefix}{index}")

    def index(self, path: str) -> int | None:
        """The index of the slot at `path`; None where that is no slot of this run."""
        name = path.removeprefix(str(self.directory / self._prefix))
        return int(name) if name.isdecimal() and self.path(int(name)) == path else None

    def allocate(self, index: int, nbytes: int, *, fresh: bool) -> str:
        """Make slot `index` hold `nbytes` at least, and return its path.

        fresh: never the file that was there: somebody may still write to it, or read it.
        Raises PublicationError where the directory has no room.
        """
        path = Path(self.path(index))
        if not fresh and _fits(path, nbytes):
            return str(path)
        path.unlink(missing_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, nbytes)  # full memory is an error now, not a SIGBUS later
            finally:
                os.close(descriptor)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise PublicationError(
                f"weight_sync.directory = '{self.directory}': no slot of {nbytes} bytes: {error.strerror}"
            ) from None
        return str(path)

    def remove(self) -> int:
        """Delete every slot of this run, those of an earlier process too; how many there were."""
        files = list(self.directory.glob(f"{self._prefix}*"))
        for file in files:
            file.unlink(missing_ok=True)
        return len(files)


class Maps:
    """The slots that this process has mapped; a map is kept while its file stays the same."""

    def __init__(self, *, writable: bool) -> None:
        self._writable = writable
        self._maps: dict[str, tuple[tuple[int, int, int], mmap.mmap]] = {}

    def open(self, path: str) -> mmap.mmap:
        """The bytes of the slot at `path`. Raises PublicationError where it is gone or another user's.

        A reader's map is private: what it writes by mistake changes nobody else's bytes.
        """
        try:
            descriptor = os.open(path, (os.O_RDWR if self._writable else os.O_RDONLY) | os.O_NOFOLLOW)
        except OSError as error:
            raise PublicationError(f"slot {path}: {error.strerror}") from None
        try:
            status = os.fstat(descriptor)
            if status.st_uid != os.getuid() or not status.st_size:
                raise PublicationError(f"slot {path}: empty, or of another user")
            identity = (status.st_dev, status.st_ino, status.st_size)
            known = self._maps.get(path)
            if known is not None and known[0] == identity:
                return known[1]
            access = mmap.ACCESS_WRITE if self._writable else mmap.ACCESS_COPY
            mapped = mmap.mmap(descriptor, status.st_size, access=access)
        finally:
            os.close(descriptor)
        self._maps[path] = (identity, mapped)
        return mapped

    def forget(self, path: str) -> None:
        """Map `path` anew next time. Views of the old map stay valid as long as somebody holds them."""
        self._maps.pop(path, None)


def _fits(path: Path, nbytes: int) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    mine = path.is_file() and not path.is_symlink() and status.st_uid == os.getuid()
    return mine and status.st_size >= nbytes and status.st_blocks * 512 >= nbytes
