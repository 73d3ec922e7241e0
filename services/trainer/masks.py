"""Which tokens of a trajectory enter the loss of a step.

`action` marks what the policy sampled; `loss`, a part of it, leaves out

    voteless     every token of a member without a vote: no reward, no gradient
    truncated    every token of a completion cut by a limit, where algorithm.truncated = "mask"
    stale        tokens over the bound, under the policies that mask (`mask`, `correct`)
    nonfinite    tokens whose behaviour log-probability is NaN or infinite

A masked token stays in the context. Reasons are counted in this order, each token once.
"""

from typing import Literal, NamedTuple

import numpy as np

from async_rl.config.schema import OnExceed
from async_rl.errors import InvariantError
from async_rl.trajectory import Score, Trajectory, token_lags

Reason = Literal["voteless", "truncated", "stale", "nonfinite"]


class Masked(NamedTuple):
    """Of one trajectory with A action tokens, those of its branches behind its own."""

    loss: np.ndarray  # [A] bool
    lag: np.ndarray  # [A] int64
    left_out: dict[Reason, int]


def loss_mask(
    trajectory: Trajectory,
    score: Score,
    *,
    step: int,
    bound: int,
    on_exceed: OnExceed,
    truncated: Literal["train", "mask"],
) -> Masked:
    """The loss mask of `trajectory` in `step`. InvariantError where a token over the bound came from a buffer
    that promised none (`wait`, `drop`), or a token from a version that does not exist yet."""
    lag = token_lags(trajectory, step)
    if lag.min() < 0:
        raise InvariantError(f"a token of version {step - int(lag.min())} in the draw of step {step}")
    stale = lag > bound
    if on_exceed in ("wait", "drop") and stale.any():
        raise InvariantError(
            f"a token of lag {int(lag.max())} in the draw of step {step}; "
            f"staleness.on_exceed = '{on_exceed}' promises at most {bound}"
        )
    everything = np.ones_like(stale)
    cut = trajectory.stop != "eos"
    reasons: list[tuple[Reason, np.ndarray]] = [
        ("voteless", everything & (not score.votes)),
        ("truncated", everything & (cut and truncated == "mask")),
        ("stale", stale),
        ("nonfinite", ~np.isfinite(trajectory.behaviour)),
    ]
    loss, left_out = everything.copy(), dict[Reason, int]()
    for reason, where in reasons:
        left_out[reason] = int((loss & where).sum())
        loss &= ~where
    return Masked(loss, lag, left_out)


def require_bound(mask: Masked, bound: int) -> None:
    """The promise, looked at once more where it counts: InvariantError if a token over `bound` would be
    trained."""
    if mask.loss.any() and int(mask.lag[mask.loss].max()) > bound:
        raise InvariantError(
            f"a token of lag {int(mask.lag[mask.loss].max())} would enter the loss; the bound is {bound}"
        )
