"""A group that kills its workers is set aside with the reason, and takes no other group along."""

from async_rl.buffers.machine import Machine
from async_rl.trajectory import Trajectory
from tests.unit.buffer_material import grade, settings, trajectory

POISON = 3


def test_a_group_that_kills_its_worker_fails_alone() -> None:
    buffer = Machine(settings(groups=8, group_size=2, eta=0, max_failures=5, on_exceed="wait"))
    life, deaths = 0, 0
    done: Trajectory = trajectory((0, 1))
    for now in range(60):
        leases = buffer.workers.acquire("rollout-0", str(life), "generate", 32, 0, float(now))
        held = [lease for lease in buffer.state.leases.values() if lease.worker == "rollout-0"]
        if any(lease.id.group == POISON for lease in held):  # dies at once, with all that it holds
            life, deaths = life + 1, deaths + 1
            continue
        for lease in leases:
            for member in list(lease.open):
                buffer.workers.finish_generate("rollout-0", str(life), lease.id, member, done, float(now))
    grade(buffer, now=60.0)
    assert buffer.state.failed == {"attempts": 1}
    assert deaths == 5
    assert "group 3" in buffer.state.last_failure
    assert "started anew" in buffer.state.last_failure
    assert buffer.state.training.count("ready") == 8  # a new group has taken its place
    buffer.state.check()
