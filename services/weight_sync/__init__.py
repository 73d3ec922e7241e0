"""The relay: takes a publication from the trainer and hands it to the rollouts of its host.

slots.py     the slot table, pure: what is visible, being written, read by whom
service.py   the actor around it
"""
