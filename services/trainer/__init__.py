"""The trainer: draws a batch, updates the policy, publishes it.

service.py      the loop over the run's steps, and what it says to the buffer and to weight-sync
step.py         one step: draw -> advantages -> masks -> mini-batches -> updates
masks.py        which tokens of a trajectory enter the loss
samples.py      the trajectories of a draw as tensors
packing.py      trajectories -> micro-batches without padding
policy.py       the model, its optimizer, one optimizer update
schedule.py     learning rate of each update
ranks.py        sums over the ranks of a trainer
evaluation.py   held-out evaluations beside the training
checkpoint.py   model folders that transformers loads
metrics.py      the figures of a step
summary.py      the figures of the run
"""
