"""Algorithms as pure tensor functions: no model, no process, no configuration file.

    advantages.py    rewards of a step's members -> advantage of each action token
    losses.py        log-probabilities and advantages -> loss of each token
    aggregation.py   which weight each token's loss has in the sum that is differentiated
    kl.py            how far the trainer's log-probabilities are from the sampler's
    registry.py      each kind by name

Rewards and statistics are in float64; what enters the graph keeps the dtype of the log-probabilities.
"""
