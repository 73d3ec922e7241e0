"""The leases that a rollout holds. Pure bookkeeping: no socket, no task."""

import hashlib

import numpy as np

from async_rl.agents.recording import padded
from async_rl.protocol.buffer import GenerateLease, LeaseId
from async_rl.services.rollout.engine import Completion, Draft
from async_rl.trajectory import Trajectory


class Held:
    """One lease, `version` being the weights its sampling began with."""

    def __init__(self, lease: GenerateLease, version: int) -> None:
        self.lease = lease
        self.version = version
        self.drafts: dict[int, list[Draft]] = {member: [] for member in lease.members}  # one for each call
        self.open = set(lease.members)  # members not yet handed in or failed

    @property
    def evaluates(self) -> bool:
        """An evaluation: it needs one version to its end, so updates wait for it."""
        return self.lease.exact_version is not None

    @property
    def oldest_version(self) -> int:
        """Oldest version among all members' tokens so far."""
        seen = (draft.oldest_version for drafts in self.drafts.values() for draft in drafts)
        return min((v for v in seen if v is not None), default=self.version)


class Ledger:
    def __init__(self) -> None:
        self.held: dict[LeaseId, Held] = {}

    @property
    def in_flight(self) -> int:
        """Trajectories owed."""
        return sum(len(held.open) for held in self.held.values())

    def progress(self) -> list[tuple[LeaseId, int]]:
        return [(id_, held.oldest_version) for id_, held in self.held.items()]

    def may_update(self, in_flight: bool) -> bool:
        """Whether the weights may change now: `in_flight` unless a lease evaluates, else with none held."""
        if in_flight:
            return not any(held.evaluates for held in self.held.values())
        return not self.held


def seed_of(run_seed: int, lease: GenerateLease, member: int, call: int = 0) -> int:
    """Of one call's random numbers: the same in every run that samples this member of this task."""
    kind = "held-out" if lease.exact_version is not None else "train"
    key = f"{run_seed}/{kind}/{lease.task.source}/{lease.task.index}/{lease.id.attempt}/{member}"
    if call:
        key += f"/{call}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest())


def trajectory(prompt: list[int], completion: Completion, text: str) -> Trajectory:
    """Token in, token out: the prompt's ids and the sampled ones, as they are."""
    before, sampled = len(prompt), len(completion.tokens)
    return Trajectory(
        tokens=np.array(prompt + completion.tokens, dtype=np.int32),
        action=np.arange(before + sampled) >= before,
        logprobs=np.array([0.0] * before + completion.logprobs, dtype=np.float32),
        versions=completion.versions,
        stop=completion.stop,
        text=text,
        survivors=None if completion.survivors is None else padded(completion.survivors),
        routing=completion.routing,
    )
