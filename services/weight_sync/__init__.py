"""The relay: takes a publication from the trainer and hands it to the rollouts of its host.

slots.py     the slot table, pure: what is visible, being written, read by whom
service.py   the actor around it

The reshard plan, pure, for trainers of many ranks; no transport follows it yet:

boxes.py     boxes of a tensor's index space
layouts.py   what ranks of a trainer hold, what tensors of an engine are made of
plan.py      which rank sends what to which host
"""
