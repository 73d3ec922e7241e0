"""The reward service: leases trajectories, has them graded in processes that can be killed, returns scores.

service.py    the loop
pool.py       worker processes, their time limit, their replacement
worker.py     what runs in such a process
pipe.py       the messages between the two
graders/      exact, math, reasoning_gym, and the user's own
"""
