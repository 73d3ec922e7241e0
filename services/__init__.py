"""The services of a run, one folder each: rollout, reward, trainer, weight_sync. None imports another.

The buffer's service lies in buffers/, around the state machine that it serves.
"""

if __name__ == "services":
    raise ImportError("import async_rl.services instead: this would be the same code under another name")
