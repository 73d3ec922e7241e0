"""What a rank of the trainer holds of a model, and where every other rank's part lies, without a word between them."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from async_rl.errors import PublicationError
from async_rl.weights.boxes import Box
from async_rl.weights.manifest import DTYPE_BYTES
from async_rl.weights.plan import Shard

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

    Model = torch.nn.Module | Mapping[str, torch.Tensor]


class Held(NamedTuple):
    """A tensor of the model. `tensor`: this rank's part of it, of the box's shape, which may be empty."""

    name: str
    aliases: list[str]  # further names: tied tensors are one
    dtype: str
    shape: tuple[int, ...]  # of the whole
    box: Box
    tensor: "torch.Tensor"


class Cut(NamedTuple):
    """What a dimension of a mesh does to a tensor: cuts it along `dim`; None: each rank has all of it. `late`: after
    the dimensions behind it, as FSDP cuts what tensor parallelism has left."""

    dim: int | None
    late: bool = False


def box_at(shape: Sequence[int], mesh: Sequence[int], cuts: Sequence[Cut], coordinate: Sequence[int]) -> Box:
    """What the rank at `coordinate` of a `mesh` of such sizes holds of a tensor of `shape`."""
    box = Box.whole(shape)
    for late in (False, True):
        for size, cut, at in zip(mesh, cuts, coordinate, strict=True):
            if cut.dim is not None and cut.late == late:
                box = box.chunk(cut.dim, size, at)
    return box


def held(model: "Model") -> list[Held]:
    """Every tensor of `model`, a module or names and tensors, tied ones once under their first name.

    Raises PublicationError for one that has no bytes here (meta device), no known dtype, or a sum pending.
    """
    from torch.distributed.tensor import DTensor

    found: list[Held] = []
    index_of: dict[object, int] = {}
    for name, tensor in _named(model):
        dtype = str(tensor.dtype).removeprefix("torch.")
        local = tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
        if dtype not in DTYPE_BYTES or local.is_meta:
            raise PublicationError(f"{name}: a tensor of {dtype} on {local.device} cannot be published")
        keys: list[object] = [id(tensor)]
        if local.numel():
            keys.append((local.device, local.data_ptr(), dtype, tuple(tensor.shape), local.stride()))
        first = next((index_of[key] for key in keys if key in index_of), len(found))
        for key in keys:
            index_of[key] = first
        if first < len(found):
            found[first].aliases.append(name)
        else:
            box = _own_box(name, tensor) if isinstance(tensor, DTensor) else Box.whole(tensor.shape)
            found.append(Held(name, [], dtype, tuple(tensor.shape), box, local))
    return found


def shards(model: "Model", ranks: int) -> list[Shard]:
    """What each of `ranks` ranks holds of every tensor of `model`; plain ones are the same on all of them."""
    from torch.distributed.tensor import DTensor

    tensors, found = dict(_named(model)), []
    for name in (one.name for one in held(model)):
        tensor = tensors[name]
        if isinstance(tensor, DTensor):
            mesh, cuts = tensor.device_mesh.mesh, _cuts(name, tensor.placements)
            for at in itertools.product(*map(range, mesh.shape)):
                found.append(Shard(int(mesh[at]), name, box_at(tensor.shape, mesh.shape, cuts, at)))
        else:
            found += [Shard(rank, name, Box.whole(tensor.shape)) for rank in range(ranks)]
    return found


def _named(model: "Model") -> Iterator[tuple[str, "torch.Tensor"]]:
    yield from (model if isinstance(model, Mapping) else model.state_dict(keep_vars=True)).items()


def _own_box(name: str, tensor: "DTensor") -> Box:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise PublicationError(f"{name}: this rank is not in its mesh")
    return box_at(tensor.shape, mesh.mesh.shape, _cuts(name, tensor.placements), coordinate)


def _cuts(name: str, placements: "Sequence[Placement]") -> list[Cut]:
    from torch.distributed.tensor.placement_types import _StridedShard

    cuts = []
    for placement in placements:
        if placement.is_partial():
            raise PublicationError(f"{name}: {placement} is a sum that is still to be made; it cannot be published")
        strided = isinstance(placement, _StridedShard)
        dim = getattr(placement, "dim", None)
        cuts.append(Cut(dim, late=strided))
    return cuts
