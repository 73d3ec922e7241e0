"""Every error that async-rl raises on purpose.

AsyncRLError
 ├─ UserError            the user can mend it: printed as one line, exit status 2
 │   ├─ ConfigError      a setting, its value, and the nearest right one
 │   └─ JournalFull      no room for the journal: the disk's, or journal.max_bytes
 ├─ JournalDamaged       bytes of the journal that are not those that were written, and what they cost
 ├─ DeadlineExceeded     a wait ended without what it waited for; names the setting that governs it
 ├─ PeerRefused          the other side answered, and said no
 ├─ WireError            bytes that are no message of ours
 ├─ WorkRevoked          a lease that is no longer ours
 ├─ EngineFault          the sampler's engine failed one request
 ├─ EngineDied           the sampler's engine is gone, and every request with it
 ├─ RankLost             a rank of the trainer is gone, and its part of the weights with it
 ├─ PublicationError     a version of the weights that did not become visible
 ├─ InvariantError       a promise of the design does not hold: a defect, never swallowed
 ├─ ServiceFailed        a service of the run ended with an error
 └─ Interrupted          Ctrl-C or SIGTERM; everything was stopped in order
"""

import difflib
from collections.abc import Iterable


class AsyncRLError(Exception):
    """Base class; `exit_status` is what a command that ends with this error returns."""

    exit_status = 1


class UserError(AsyncRLError):
    exit_status = 2


class ConfigError(UserError):
    pass


class JournalFull(UserError):
    pass


class JournalDamaged(AsyncRLError):
    pass


class DeadlineExceeded(AsyncRLError):
    """`missing` did not come within `seconds`, governed by the configuration key `setting`."""

    def __init__(self, missing: str, seconds: float, setting: str) -> None:
        super().__init__(f"{missing} did not come within {seconds:g} s ({setting} = {seconds:g})")
        self.missing = missing
        self.seconds = seconds
        self.setting = setting


class PeerRefused(AsyncRLError):
    pass


class WireError(AsyncRLError):
    pass


class WorkRevoked(AsyncRLError):
    pass


class EngineFault(AsyncRLError):
    pass


class EngineDied(AsyncRLError):
    pass


class RankLost(AsyncRLError):
    """Whoever watches the process starts it anew."""

    exit_status = 75


class PublicationError(AsyncRLError):
    pass


class InvariantError(AsyncRLError):
    pass


class ServiceFailed(AsyncRLError):
    pass


class Interrupted(AsyncRLError):
    exit_status = 130

    def __init__(self) -> None:
        super().__init__("interrupted; every service was stopped")


def nearest(word: str, choices: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the choice nearest to `word`, or the list of choices when none is near."""
    names = sorted(choices)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f" (did you mean '{close[0]}'?)"
    return f" (one of: {', '.join(names)})" if names else ""
