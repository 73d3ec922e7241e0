"""A grading process: `python -m async_rl.services.reward.worker PARENT_PID`, started by the pool.

Two processes in one group of their own. The first does nothing but keep: it ends the whole group, the
grader's own children included, when the grader ends or the service dies. The second builds the grader and
grades. Nothing heavy is imported before the fork.
"""

import os
import signal
import sys
from typing import Any, BinaryIO, NoReturn

from async_rl.actor.process import die_with_parent


def main(parent: int) -> NoReturn:
    # a print() in the user's grader must not end up among the frames: fd 1 becomes stderr, fd 0 nothing
    inbox, outbox = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an ordered stop is the service's business
    die_with_parent(str(parent), signal.SIGTERM)
    keeper = os.getpid()
    grader = os.fork()
    if grader == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(str(keeper), signal.SIGKILL)
        with os.fdopen(inbox, "rb") as orders, os.fdopen(outbox, "wb", buffering=0) as answers:
            serve(orders, answers)
        sys.exit(0)
    os.close(inbox)
    _, status = os.waitpid(grader, 0)
    report(outbox, os.waitstatus_to_exitcode(status))
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("unreachable")


def report(outbox: int, code: int) -> None:
    """Tell the pool how the grader ended, if it still listens."""
    from async_rl.actor.wire import Codec
    from async_rl.services.reward import pipe

    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.write(outbox, pipe.pack(Codec(pipe.Answer), pipe.Gone(f"the grading process ended by itself: {how}")))


def serve(orders: BinaryIO, answers: BinaryIO) -> None:
    """Build the grader, then grade until the orders end."""
    from async_rl.actor.wire import Codec
    from async_rl.errors import UserError
    from async_rl.services.reward import pipe
    from async_rl.services.reward.graders import Grader, build, failed
    from async_rl.trajectory import Score

    read, write = Codec(pipe.Order), Codec(pipe.Answer)

    def order() -> Any:
        head = orders.read(pipe.HEAD_BYTES)
        return pipe.unpack(read, orders.read(pipe.length(head))) if head else None

    def graded(grader: Grader, request: pipe.Grade) -> Score:
        try:
            return grader.grade(request.task, request.trajectory)
        except Exception as error:  # foreign code: whatever it raises is a status, and the next answer is due
            return failed(f"{type(error).__name__}: {error}")

    first: pipe.Build = order()
    try:
        grader = build(first.grader)
    except UserError as error:
        answers.write(pipe.pack(write, pipe.Unusable(str(error))))
        return
    answers.write(pipe.pack(write, pipe.Ready()))
    while (request := order()) is not None:
        answers.write(pipe.pack(write, pipe.Graded(graded(grader, request))))


if __name__ == "__main__":
    main(int(sys.argv[1]))
