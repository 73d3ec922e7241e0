"""Whether what a worker reports may be taken. Pure; each answer is the reason against it, or None."""

import math

from async_rl.buffers.group import Group, Lease
from async_rl.trajectory import Score, Trajectory


def unfit_version(lease: Lease, version: int, *, newest: int, exact: int | None) -> str | None:
    """A lease's oldest token has `version`: it must not be born stale, nor come from unpublished weights."""
    if exact is not None and version != exact:
        return f"an evaluation of version {exact} was sampled at {version}"
    if version < lease.oldest:
        return f"sampled at version {version}, but granted for {lease.oldest} or younger"
    if version > newest:
        return f"sampled at version {version}, but the newest is {newest}"
    return None


def unfit_trajectory(group: Group, lease: Lease, trajectory: Trajectory, *, newest: int, in_flight: bool) -> str | None:
    """Malformed, older than it may be, or of several versions where the mode promises one."""
    wrong = trajectory.problems()
    if wrong is not None:
        return wrong
    versions = sorted({version for version, _ in trajectory.spans})
    for version in (versions[0], versions[-1]):
        wrong = unfit_version(lease, version, newest=newest, exact=group.exact_version)
        if wrong is not None:
            return wrong
    if len(versions) > 1 and not in_flight:
        return f"one trajectory mixes the versions {versions}, but this mode has no in-flight update"
    return None


def unfit_score(score: Score) -> str | None:
    """A reward that is no number, or one that contradicts its status."""
    if score.reward is not None and not math.isfinite(score.reward):
        return f"the grader's reward is {score.reward}"
    silent = score.status in ("abstained", "failed")
    if silent == score.votes:
        return f"a score '{score.status}' with reward {score.reward}"
    return None
