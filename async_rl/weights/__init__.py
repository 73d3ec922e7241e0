"""Weights on their way from the ranks of a trainer to the rollouts.

What goes where, pure:

    boxes.py      boxes of a tensor's index space
    layouts.py    what tensors of an engine are made of
    plan.py       the reshard plan: which rank sends what to which host
    manifest.py   where each tensor lies in a slot, and the checks of a receiver
    parcels.py    a rank's pieces as messages, alike on both sides
    order.py      what the leading rank tells the others, and what they answer
    relays.py     which relays there are, and which of them is a rollout's

On the ranks:

    holdings.py   what a rank holds, and what every other one does
    draft.py      what a version is made of
    writer.py     the leading rank: Publisher; line.py: one relay as it knows it
    carry.py      every rank: carry_out(order, ...)
    source.py     the bytes of its parcels
    shm.py, sending.py, links.py, disk.py, delta.py    how they go

On a relay: receiving.py; on a rollout: reader.py, Subscriber; on all: slot.py, a mapped file in
`weight_sync.directory`.

A publication is Offer -> Slot -> order -> outcomes -> Commit or Seal -> Visible (async_rl/protocol/weight_sync.py).
"""
