"""Several relays: their names, who uses which, and what a configuration cannot mean."""

import socket

import pytest

from async_rl.cli.serve import service_name
from async_rl.config.weight_sync import weight_sync_problems
from async_rl.errors import UserError
from async_rl.rundir import RunDir
from async_rl.supervisor.roster import roster
from async_rl.weights.links import Hub, address_towards, hub_address
from async_rl.weights.relays import chosen, relay_names, relay_of
from async_rl.weights.slot import Slots
from tests.flow.actor_material import settings


def several(tmp_path, *overrides):
    return settings(tmp_path, ("weight_sync.relays=3", "rollout.workers=6", *overrides))


def test_one_relay_has_the_name_it_always_had_and_several_are_numbered(tmp_path):
    assert relay_names(settings(tmp_path)) == ["weight_sync"]
    config = several(tmp_path)
    assert relay_names(config) == ["weight_sync-0", "weight_sync-1", "weight_sync-2"]
    roles = [role for role in roster(config) if role.service == "weight-sync"]
    assert [(role.name, role.index) for role in roles] == [(f"weight_sync-{k}", k) for k in range(3)]
    assert service_name(config, "weight-sync", 2) == "weight_sync-2"
    assert service_name(settings(tmp_path), "weight-sync", 0) == "weight_sync"
    with pytest.raises(UserError, match=r"--index 3: weight_sync.relays = 3, so the last one is 2"):
        service_name(config, "weight-sync", 3)


@pytest.mark.parametrize(
    ("hosts", "worker", "index"),
    [
        (["a", "a", "a"], 4, 1),  # spread by number
        (["a", None, None], 0, 0),  # its own is there
        (["a", None, None], 1, None),  # its own may be yet to come
        (["b", "b", "a"], 0, 2),  # never another host's
        (["a", "b", "a"], 1, 2),
        (["a", "b", "a"], 4, 0),
    ],
)
def test_a_rollout_uses_a_relay_of_its_own_host(hosts, worker, index):
    assert chosen(hosts, "a", worker) == index


def test_a_host_without_a_relay_is_told_what_to_start():
    with pytest.raises(UserError, match=r"no relay runs on c, .* `async-rl serve weight-sync` there .*, on a, b\)"):
        chosen(["a", "b"], "c", 0)


def test_the_announcement_carries_the_host(tmp_path):
    config = several(tmp_path)
    run = RunDir.of(config)
    run.create()
    assert relay_of(config, run, 4) is None
    run.announce("weight_sync-1", "tcp://127.0.0.1:5")
    assert run.host("weight_sync-1") == socket.gethostname()
    assert relay_of(config, run, 4) == "weight_sync-1"


def test_the_slots_of_two_relays_are_different_files_and_are_removed_together(tmp_path):
    first, second = (Slots(str(tmp_path), tmp_path / "run", name) for name in relay_names(several(tmp_path))[:2])
    paths = {slots.allocate(index, 4096, fresh=False) for slots in (first, second) for index in range(2)}
    assert len(paths) == 4
    assert second.index(first.path(0)) is None
    assert first.remove() == 2
    assert Slots(str(tmp_path), tmp_path / "run").remove() == 2


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), ""),
        (("services.weight_sync=tcp://127.0.0.1:5",), "leave it empty with weight_sync.relays = 3"),
        (("rollout.workers=2",), "weight_sync.relays = 3: .* rollout.workers = 2"),
        (("weight_sync.full_every=4",), "full_every = 4 saves nothing with transport = 'shm'"),
        (("weight_sync.path=/shared",), "path = '/shared' is for transport = 'disk'"),
        (("weight_sync.device=cuda",), "is for transport = 'collective'"),
        (("weight_sync.device=cudda", "weight_sync.transport=collective"), "did you mean 'cuda'"),
        (("weight_sync.device=cuda:x", "weight_sync.transport=collective"), "no such device"),
        (("weight_sync.operation_s=30", "weight_sync.publish_s=20"), "operation_s = 30 is longer"),
    ],
)
def test_what_cannot_work_is_one_line_that_names_the_setting(tmp_path, overrides, said):
    found = list(weight_sync_problems(several(tmp_path, *overrides)))
    assert len(found) == bool(said)
    if said:
        with pytest.raises(UserError, match=said):
            raise UserError(found[0])


def test_the_store_of_a_collective_is_on_loopback_while_everybody_is():
    assert hub_address([]) == "127.0.0.1"
    assert hub_address(["tcp://127.0.0.1:5000", "localhost:80", "[::1]:7", ""]) == "127.0.0.1"
    assert address_towards("127.0.0.1") == "127.0.0.1"


def test_the_store_listens_at_its_own_address_alone():
    hub = Hub("127.0.0.1")
    socket.create_connection((hub.host, hub.port), 5).close()
    with socket.socket() as other, pytest.raises(OSError, match="refused"):
        other.connect(("127.0.0.2", hub.port))
