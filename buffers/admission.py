"""How many groups may be held, and how old the weights may be that sample one. Pure numbers.

m: groups trained + groups held. B: groups of a step. r: reuse. v: policy version. eta': bound at a draw.
"""


def due(m: int, version: int, *, groups: int, reuse: int) -> int:
    """The step that the next group is for: max(r * floor(m / B), v)."""
    return max(reuse * (m // groups), version)


def capacity(m: int, version: int, *, groups: int, reuse: int, eta_prime: int, max_steps: int) -> int:
    """How many more groups may be admitted: those with due <= v + eta' and due < max_steps."""
    last = min(version + eta_prime, max_steps - 1)
    if last < version:
        return 0
    return max(0, (last // reuse + 1) * groups - m)


def min_version(due: int, version: int, eta_prime: int) -> int:
    """The oldest weights that may sample a group due at step `due`: no sample is born stale."""
    return max(0, max(due, version) - eta_prime)
