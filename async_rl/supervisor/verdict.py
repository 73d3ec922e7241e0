"""What the end of a process means for the run: a pure decision.

Once the run is ending (its summary is written, or it is being stopped) any end but the trainer's means nothing.

| service     | status 0                | status 2 (the user's) | anything else            |
|-------------|-------------------------|-----------------------|--------------------------|
| trainer     | the run is over         | fatal                 | as the buffer; the loss of a rank is like a signal |
| buffer      | fatal before the end    | fatal                 | restart after a signal, where there is a journal |
| weight-sync | restart before the end  | fatal                 | restart, a few times     |
| rollout     | restart before the end  | fatal                 | restart, a few times     |
| reward      | restart before the end  | fatal                 | restart, a few times     |
"""

from typing import Literal

from async_rl.errors import RankLost

Verdict = Literal["over", "ignore", "restart", "fatal"]

RESTARTABLE = ("rollout", "reward", "weight-sync")
USER_STATUS = 2


def verdict(
    service: str, status: int, *, ending: bool, deaths_in_a_row: int, max_failures: int, journal: bool
) -> Verdict:
    """`ending`: the trainer is done or the run is being stopped. `deaths_in_a_row` counts this one.

    `status` is the exit status, negative for a signal. `journal`: the run keeps one (journal.enabled). A buffer or
    a trainer that ended by its own judgement would come to the same one again.
    """
    if ending:
        return "ignore"
    if service == "trainer" and status == 0:
        return "over"
    killed = status < 0 or (service == "trainer" and status == RankLost.exit_status)
    again = service in RESTARTABLE or (service in ("buffer", "trainer") and journal and killed)
    if status == USER_STATUS or not again:
        return "fatal"
    return "restart" if deaths_in_a_row <= max_failures else "fatal"
