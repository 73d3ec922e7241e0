"""Figures that stay where nothing is learned, said in words once. Pure."""

from collections.abc import Callable
from typing import NamedTuple

from async_rl.services.trainer.metrics import StepRecord

IN_ROW = 5  # steps


class Concern(NamedTuple):
    share: Callable[[StepRecord], float]
    limit: float
    words: str


def _freshest_mismatch(record: StepRecord) -> float:
    """k3 of the tokens of the smallest lag, which the policy's own moves explain least."""
    by_lag = record.mismatch_by_lag
    return by_lag[min(by_lag)][1] if by_lag else 0.0


CONCERNS = (
    Concern(
        lambda record: record.truncated_share,
        0.5,
        "{share:.0%} of the trajectories are cut by a limit ({stops}), for {steps} steps: what is cut is mostly wrong; "
        "see sampling.max_new_tokens, environment.max_turns, environment.max_tokens",
    ),
    Concern(
        lambda record: record.zero_variance_share,
        0.8,
        "{share:.0%} of the groups have equal rewards, for {steps} steps: they carry no gradient; the tasks are too "
        "easy or too hard, see filter.equal and the grader",
    ),
    Concern(
        lambda record: 1 - record.voting / record.members,
        0.5,
        "{share:.0%} of the trajectories have no vote, for {steps} steps: the grader abstains or fails; see the logs "
        "of the reward services",
    ),
    Concern(
        _freshest_mismatch,
        0.1,
        "the mismatch KL of the freshest tokens is {share:.2g}, for {steps} steps: the sampler computes something else "
        "than the trainer (precision, attention, sampling), or a step moves the policy too far; see model.dtype, "
        "trainer.dtype, trainer.learning_rate",
    ),
)


class Concerns:
    """What to worry about after each step."""

    def __init__(self) -> None:
        self._in_row = [0] * len(CONCERNS)

    def note(self, record: StepRecord) -> list[str]:
        """The concerns that have lasted for IN_ROW steps now; each is said again only after it was gone."""
        said = []
        for number, concern in enumerate(CONCERNS):
            share = concern.share(record)
            self._in_row[number] = self._in_row[number] + 1 if share > concern.limit else 0
            if self._in_row[number] == IN_ROW:
                cut = {stop: part for stop, part in record.stops.items() if stop != "eos"}
                stops = ", ".join(f"{stop} {part:.0%}" for stop, part in sorted(cut.items(), key=lambda s: -s[1]))
                said.append(concern.words.format(share=share, stops=stops, steps=IN_ROW))
        return said
