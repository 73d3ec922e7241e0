"""Shared prompts: the members of a group have one prompt, and its keys and values are computed once.

transformers' paged cache finds pages by a hash of the tokens in them and before them, once they are written.
Two things are missing for us: requests that arrive together would all miss, so followers wait for the first
one's prompt (`Prefills`); and a page outlives an update of the weights, so every update forgets all hashes
(`forget`), and pages of older weights are never hashed again (`share_only`).
"""

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

R = TypeVar("R", bound=Hashable)
Prompt = tuple[int, ...]


class Prefills(Generic[R]):
    """Which request computes a prompt, and which ones wait for it. Pure bookkeeping."""

    def __init__(self) -> None:
        self._leaders: dict[Prompt, R] = {}
        self._followers: dict[Prompt, list[R]] = {}

    def enter(self, prompt: Prompt, request: R) -> bool:
        """True where `request` is to compute the prompt; False where it waits for the one that does."""
        if prompt in self._leaders:
            self._followers[prompt].append(request)
            return False
        self._leaders[prompt], self._followers[prompt] = request, []
        return True

    def leave(self, prompt: Prompt, request: R) -> list[R]:
        """`request` has computed the prompt, or is gone; who waited for it and may go now."""
        if self._leaders.get(prompt) == request:
            del self._leaders[prompt]
            return self._followers.pop(prompt)
        waiting = self._followers.get(prompt, [])
        if request in waiting:
            waiting.remove(request)
        return []

    def clear(self) -> list[R]:
        """Forget all; everyone who waited, in order."""
        waiting = self.waiting
        self._leaders.clear()
        self._followers.clear()
        return waiting

    @property
    def waiting(self) -> list[R]:
        """Everyone who waits, in order."""
        return [request for followers in self._followers.values() for request in followers]


def share_only(cache: Any, current: Callable[[str], bool]) -> None:
    """Let `cache` hash only the pages of requests whose id is `current`."""
    register = cache.mark_complete_blocks

    def mark(state: Any, complete: dict[str, int]) -> None:
        if current(state.request_id):
            register(state, complete)

    cache.mark_complete_blocks = mark


def forget(cache: Any) -> None:
    """No page written so far is found by a prompt any more; those in use stay with their requests."""
    cache.evict_cached_blocks()
    for allocator in cache.cache_allocators.values():
        allocator.ledger.hash_to_block.clear()
        allocator.ledger.block_to_hash.clear()
