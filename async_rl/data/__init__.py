"""Where tasks come from: JSON lines, Hugging Face data sets on disk, reasoning-gym; mixed by weight.

    stream.py    TaskStream (random access to the run's tasks), held_out_tasks, check
    mixture.py   which source a position of the stream belongs to (pure)
    rows.py      a row of any source, and the Task it becomes
    jsonl.py, hugging_face.py, gym.py    one source each; it alone imports the package it needs
    fingerprint.py    checksums of all that: a run that goes on with other data is told

The stream keeps no cursor: the buffer asks for positions, so that the cursor follows what was trained.
"""

from async_rl.data.fingerprint import fingerprint
from async_rl.data.stream import TaskStream, check, held_out_tasks

__all__ = ["TaskStream", "check", "fingerprint", "held_out_tasks"]
