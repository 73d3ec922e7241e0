"""Algorithms as pure tensor functions: no model, no process, no configuration file.

    members.py           what a step knows of its trajectories, and what a loss is given
    registry.py          each kind by name
    advantages.py        estimators that compare the rewards of a group; groups.py, whitening.py: what they share
    returns.py           estimators with a value for each token: GAE, REINFORCE++, ReMax, PRIME
    token_baseline.py    the baseline of least variance at each token
    losses.py            log-probabilities and advantages -> loss of each token
    corrections.py       weights and rejections for tokens of older policies
    kl.py                how far the trainer is from the sampler, and from a reference
    aggregation.py       which weight each token's loss has in the sum that is differentiated
    value.py             what the critic and PRIME's reward model minimise
    shaping.py           rewards before advantages, the choice of members after them
    custom_*.py          the user's own

Rewards and statistics are in float64; what enters the graph keeps the dtype of the log-probabilities.
"""
