"""async-rl: asynchronous reinforcement learning for language models.

        lease: a group to generate                  lease: trajectories to score
      +------------------------------+            +-----------------------------+
      |                              v            |                             v
 +----+-----+  trajectories   +------+---+   +----+-----+   scores       +------+---+
 |  buffer  |<----------------|  rollout |   |  buffer  |<---------------|  reward  |
 +----+-----+                 +-----^----+   +----------+                +----------+
      ^  |                          | weights, version v
      |  | draw: a batch of groups  |
      |  v                    +-----+-------+
 +----+-----+                 | weight-sync |
 | trainer  |---------------->+-------------+
 +----------+  manifest, shards

Five kinds of process, each an actor with one mailbox. The buffer alone knows about everybody's work:
it leases groups to rollout workers and trajectories to reward workers, and lets the trainer draw.

Where things are:
  async_rl/trajectory.py   the vocabulary: task, trajectory, score, lag of a token
  async_rl/protocol/       the messages of each service, one file each
  async_rl/actor/          mailbox, remote, wire format, the life of a service
  async_rl/config/         one TOML file describes a run
  async_rl/data/           sources of tasks, mixed by weight
  async_rl/algorithms/     advantages, losses, aggregation: pure tensor functions
  async_rl/models/         loading, packed attention, warm-up
  async_rl/weights/        manifest, slots in shared memory, publisher and subscriber
  async_rl/supervisor/     what `async-rl train` does around the services
  async_rl/cli/            one file a command
  buffers/                 the pure state machine and its service   (imported as async_rl.buffers)
  services/                rollout, reward, trainer, weight_sync    (imported as async_rl.services)
"""

from async_rl.version import __version__

__all__ = ["__version__"]
