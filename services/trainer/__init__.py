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
ranks.py        the ranks of a trainer, and sums over them
sharding.py     a model in parts on the ranks (FSDP2)
sequence.py     rows of tokens over ranks (Ulysses)
tensor.py       matrices over ranks
team.py         the ranks as processes: the leading one's side
follower.py     the others
orders.py       what the leading one tells them
work.py         what each does then
evaluation.py   held-out evaluations beside the training
checkpoint.py   model folders that transformers loads
captured.py     what a checkpoint is made of: copies, written meanwhile
metrics.py      the figures of a step
summary.py      the figures of the run
"""
