"""The trainer: draws a batch, updates the policy, publishes it.

service.py      the loop over the run's steps, and what it says to the buffer and to weight-sync
step.py         one step as a dataflow over roles: draw -> what they say -> advantages -> updates
roles.py        policy, reference, critic, reward model, teacher
objective.py    what an update of the policy minimises
concerns.py     figures that stay where nothing is learned, in words
masks.py        which tokens of a trajectory enter the loss
samples.py      the trajectories of a draw as tensors
packing.py      trajectories -> micro-batches without padding
balance.py      work over ranks, evenly
network.py      a model over packed rows, and what is read from it
logits.py       logits that never stand in memory whole
trained.py      a network with its optimizer
policy.py       one update of the policy
critic.py       values, and an update of them
reward_model.py PRIME's implicit rewards, learnt from outcomes
schedule.py     learning rate of each update
ranks.py        sums over the ranks of a trainer
evaluation.py   held-out evaluations beside the training
checkpoint.py   model folders that transformers loads
metrics.py      the figures of a step
summary.py      the figures of the run
"""
