"""Which experts the routers of the transformers engine chose for each token, kept beside its keys and values.

A token is computed once for all requests that share its page of the cache, so what was chosen is kept by page, as
the keys and values are: a request that finds its prompt in the cache finds its routing there.

    forward pass     [T, layers, k], the rows of all requests behind one another
      -> pages       of each request, by the block table of the cache
      -> drafts      the tokens computed; before a request's first ones, those of the pages that it found
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from async_rl.models.routers import experts, routers
from async_rl.services.rollout.engine import Draft
from async_rl.trajectory import UNROUTED, routing_dtype


class _Drafting(Protocol):
    draft: Draft


class Routing:
    """Of `model`, which samples with the paged `cache` of transformers. UserError where it has no known routers."""

    def __init__(self, model: Any, cache: Any) -> None:
        found = list(routers(model).values())
        self._dtype = routing_dtype(max(map(experts, found)))
        self._step: list[torch.Tensor] = []
        for router in found:
            router.register_forward_hook(lambda _module, _args, output: self._step.append(output[2]))
        self._allocator = next(iter(cache.cache_allocators.values()))
        self._page_size: int = self._allocator.tokens_per_page
        self._pages: dict[int, np.ndarray] = {}  # [page_size, layers, k]

    def take(self, batch: Sequence[Any], requests: Mapping[str, _Drafting]) -> None:
        """What the forward pass over `batch` chose, to the drafts of `requests`; in the generation thread."""
        step, self._step = self._step, []
        rows = torch.stack(step, dim=1).cpu().numpy().astype(self._dtype)
        at = 0
        for entry in batch:
            end = entry.state.position_offset  # behind what was just computed
            own, begin = rows[at : at + entry.query_length], end - entry.query_length
            at += entry.query_length
            pages = self._allocator.block_table[entry.state.request_id]
            self._write(pages, begin, own)
            request = requests.get(entry.state.request_id)
            if request is not None:
                kept = request.draft.routing
                kept[begin:end] = [*self._read(pages, len(kept), begin), *own]

    def _write(self, pages: Sequence[int], begin: int, rows: np.ndarray) -> None:
        for position, row in enumerate(rows, begin):
            page, place = divmod(position, self._page_size)
            if pages[page] not in self._pages:
                self._pages[pages[page]] = np.full((self._page_size, *row.shape), UNROUTED, self._dtype)
            self._pages[pages[page]][place] = row

    def _read(self, pages: Sequence[int], begin: int, end: int) -> list[np.ndarray]:
        """Of the positions from `begin` to `end`, copies: a page is written again when it is another's."""
        places = (divmod(position, self._page_size) for position in range(begin, end))
        return [self._pages[pages[page]][place].copy() for page, place in places]
