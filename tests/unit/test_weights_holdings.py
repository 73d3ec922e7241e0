"""Where every rank's part of a parameter lies, against what torch says on meshes of one and two dimensions."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Partial
from torch.testing._internal.distributed.fake_pg import FakeStore

from async_rl.errors import PublicationError
from async_rl.weights.boxes import Box
from async_rl.weights.draft import draft
from async_rl.weights.holdings import held, shards


@pytest.fixture
def world():
    """Be rank 0 of a world whose collectives do nothing. One rank only: torch remembers who it was."""

    def of(size):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)

    yield of
    dist.destroy_process_group()


def torch_says(shape, mesh, placements, coordinate):
    """The box of the rank at `coordinate`."""
    local, low = _compute_local_shape_and_global_offset(shape, mesh.shape, list(coordinate), placements)
    return Box(tuple(low), tuple(a + n for a, n in zip(low, local, strict=True)))


def same(box, other):
    return box == other or (not box.size and box.shape == other.shape)


class Net(torch.nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.embed = torch.nn.Embedding(13, 8)
        self.up = torch.nn.Linear(8, 12, bias=True)
        self.down = torch.nn.Linear(12, 8, bias=False)
        self.lm_head = torch.nn.Linear(8, 13, bias=False)
        self.register_buffer("scale", torch.tensor(2.5))
        self.register_buffer("one", torch.ones(1))
        if tied:
            self.lm_head.weight = self.embed.weight


def sharded(ranks, tensor_parallel, tied=True):
    model = Net(tied)
    if tensor_parallel > 1:
        mesh = init_device_mesh("cpu", (ranks // tensor_parallel, tensor_parallel), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh["dp"]
    else:
        mesh = init_device_mesh("cpu", (ranks,))
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("ranks", "tensor_parallel"), [(1, 1), (2, 1), (3, 1), (5, 1), (16, 1), (4, 2), (8, 2), (6, 2)]
)
def test_a_rank_knows_what_all_hold_and_it_is_what_torch_says(world, ranks, tensor_parallel, tied):
    world(ranks)
    model = sharded(ranks, tensor_parallel, tied)
    found = held(model)
    assert [one.aliases for one in found if one.name == "embed.weight"] == [["lm_head.weight"] if tied else []]
    known = {(shard.rank, shard.parameter): shard.box for shard in shards(model, ranks)}
    tensors = model.state_dict(keep_vars=True)
    for one in found:
        tensor = tensors[one.name]
        assert one.shape == tuple(tensor.shape)
        assert known[0, one.name] == one.box
        assert tuple(one.tensor.shape) == one.box.shape
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            for at in itertools.product(*map(range, mesh.shape)):
                said = torch_says(tensor.shape, mesh, tensor.placements, at)
                assert same(known[int(mesh.mesh[at]), one.name], said)
        else:
            assert {known[rank, one.name] for rank in range(ranks)} == {Box.whole(tensor.shape)}
        elements = {
            index
            for (_, name), box in known.items()
            if name == one.name
            for index in itertools.product(*map(range, box.low, box.high))
        }
        assert len(elements) == tensor.numel()  # together they hold every element


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Shard(1)),
        (Shard(1), Shard(0)),
        (Replicate(), Shard(1)),
        (Shard(0), Replicate()),
        (Shard(0), Shard(0)),
        (Replicate(), Replicate()),
    ],
)
def test_placements_on_a_mesh_of_two_dimensions_are_what_torch_says(world, placements):
    world(6)
    mesh = init_device_mesh("cpu", (2, 3))
    model = {"w": distribute_tensor(torch.zeros(7, 5), mesh, placements)}
    known = {shard.rank: shard.box for shard in shards(model, 6)}
    for at in itertools.product(range(2), range(3)):
        assert same(known[int(mesh.mesh[at])], torch_says((7, 5), mesh, placements, at))
    assert held(model)[0].box == known[0]


def test_a_sum_that_is_pending_cannot_be_published(world):
    world(2)
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(PublicationError, match=r"w: .* sum"):
        held({"w": DTensor.from_local(torch.zeros(2), mesh, [Partial()])})


def test_a_draft_gives_every_element_to_each_relay_once(world):
    world(4)
    made = draft(sharded(4, 1, tied=False), 4, ["a", "b"], 2**20, None)
    for of_ranks in made.pieces.values():
        assert len(of_ranks) == 4
        elements = sum(Box(tuple(p.low), tuple(p.high)).size for pieces in of_ranks for p in pieces)
        assert elements == sum(torch.Size(entry.shape).numel() for entry in made.tensors)


def test_what_all_ranks_hold_is_sent_by_all_of_them():
    made = draft({str(k): torch.zeros(10, k + 1) for k in range(8)}, 4, ["a"], 2**20, None)
    sent = [sum(made.tensors[p.tensor].nbytes for p in own) for own in made.pieces["a"]]
    assert max(sent) - min(sent) <= 8 * 10 * 4


def test_floating_tensors_are_published_in_the_dtype_that_was_asked_for():
    model = Net()
    model.register_buffer("count", torch.tensor([1, 2]))
    made = draft(model, 1, ["a"], 2**20, "bfloat16")
    assert {entry.name: entry.dtype for entry in made.tensors}["embed.weight"] == "bfloat16"
    assert {entry.name: entry.dtype for entry in made.tensors}["count"] == "int64"
