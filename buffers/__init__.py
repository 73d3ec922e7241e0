"""The buffer: who works on which group, what may be trained when. The heart of the ring.

                 admission.py                     draw.py
    task stream ------------> waiting                        trained(step)
                                 | grants.py                     ^
                                 v                               |
                              leased -> generated -> grading -> ready -> drawn
                                 |  life.py decides each arrow: enough votes, another attempt, failed
                                 v
                              failed(reason) | dropped(reason)

  pure, no socket, no clock, no thread, no randomness; time comes in as `now`:
    settings.py    the numbers of a run
    events.py      everything that can happen, as frozen structs
    group.py       a group and its lease
    state.py       the state, and `apply(event)`: the only thing that changes it
    admission.py   how many groups may be held, how old weights may be
    grants.py      which groups a worker gets
    life.py        what a group's last result makes of it
    draw.py        which groups a step gets, and when it must wait
    fitness.py     whether what a worker reports may be taken
    store.py       where trajectories and draws lie: the state has their places alone
    snapshot.py    the state as plain data, and again
    roster.py      who is alive; soft state that no journal keeps
    evaluation.py  an evaluation's tallies
    for_workers.py, for_trainer.py   the commands: decide, apply, answer
    core.py, machine.py              what they share, and the whole
    report.py      the conservation line, the table of groups, what a draw waits for
    inspect.py, history.py           what a journal tells: of the whole, of one group
  around it:
    journal/       where events become durable, and the state again
    line.py        who waits for work, woken one at a time
    service.py     the mailbox, long polls, the ticker

Redo is `for event in journal: state.apply(event)`.
"""

if __name__ == "buffers":
    raise ImportError("import async_rl.buffers instead: this would be the same code under another name")
