"""The ranks of a trainer. Whatever is a total of a step goes through here, so that the code reads the same on
one rank, where these are the identity, and on many."""

from typing import NamedTuple

import torch
from torch import Tensor


class Ranks(NamedTuple):
    rank: int = 0
    size: int = 1

    def sum_(self, values: Tensor) -> Tensor:
        """`values` summed over the ranks, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.SUM)
        return values

    def max_(self, values: Tensor) -> Tensor:
        """The largest of each of `values` over the ranks, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX)
        return values
