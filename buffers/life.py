"""What a group's last result makes of it. Pure: a group in, the events that are due out."""

import math

from async_rl.buffers import events
from async_rl.buffers.group import Group
from async_rl.buffers.settings import Settings
from async_rl.config.schema import Filter
from async_rl.trajectory import EQUAL, Score


def next_events(group: Group, settings: Settings, detail: str) -> list[events.Any]:
    """Called after each change of `group`; `detail` is the reason that goes into the log if it fails now."""
    if group.phase in ("waiting", "generated") and group.failures >= settings.max_failures:
        if group.exact_version is not None:
            return [events.Evaluated(group.id)]
        return [events.Failed(group.id, "attempts", f"{group.failures} attempts, the last: {detail}")]
    if group.phase != "scored":
        return []
    return _judge_sample(group) if group.exact_version is not None else _judge(group, settings)


def _judge(group: Group, settings: Settings) -> list[events.Any]:
    """Ready with enough votes; else new members take the place of those without one, once; else failed."""
    voters = group.voters
    if len(voters) >= settings.min_valid:
        reason = _unwanted([_judged(group.scores[member], settings.filter) for member in voters], settings.filter)
        return [events.Readied(group.id) if reason is None else events.Dropped(group.id, reason)]
    silent = [member for member in group.trained if member not in voters]
    if not group.refilled:
        return [_refill(group, silent)]
    why = group.scores[silent[0]]
    detail = f"{len(voters)} of {len(group.trained)} members vote, batch.min_valid = {settings.min_valid}"
    return [events.Failed(group.id, "min_valid", f"{detail}; member {silent[0]}: {why.status} {why.detail}".rstrip())]


def _judged(score: Score, wanted: Filter) -> float:
    """What the filter looks at: a reward with a penalty for length in it differs between answers that are all right."""
    reward = score.reward or 0.0
    return reward if wanted.component is None else score.components.get(wanted.component, reward)


def _unwanted(rewards: list[float], wanted: Filter) -> events.Unwanted | None:
    """Why a group with these votes is not worth a place in a step. Votes are equal up to float noise."""
    lowest, highest, mean = min(rewards), max(rewards), sum(rewards) / len(rewards)
    if wanted.equal and math.isclose(lowest, highest, rel_tol=EQUAL):
        return "equal"
    if wanted.min_mean is not None and mean < wanted.min_mean:
        return "hard"
    if wanted.max_mean is not None and mean > wanted.max_mean:
        return "easy"
    return None


def _judge_sample(group: Group) -> list[events.Any]:
    """A held-out sample without a score by an infrastructure fault is made anew, once; then it abstains."""
    failed = [member for member in group.wanted if group.scores[member].status == "failed"]
    if failed and not group.refilled:
        return [_refill(group, failed)]
    return [events.Evaluated(group.id)]


def _refill(group: Group, out: list[int]) -> events.Refilled:
    first = max(group.wanted) + 1
    return events.Refilled(group.id, out, list(range(first, first + len(out))))
