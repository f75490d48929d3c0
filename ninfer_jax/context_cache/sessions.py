"""Which catalogued owner a session's next request is expected to go on from (Y-3, Y-4).

Owns the index as a value. A binding only helps to choose among sources that were found and verified without
it; it proves nothing (SES-04). A session's publication order only grows, also while nothing is bound, so that
an older request that ends late stays anonymous.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from ninfer_jax.errors import InvariantError
from ninfer_jax.reuse import OwnerKey

# Orders outlive their owners only for requests that are still outstanding, which are far fewer than this.
MAX_UNBOUND: Final = 1024


@dataclass(frozen=True)
class Binding:
    """What one session is bound to.

    Attributes:
        order: publication order of the newest request that published for the session.
        owner: what it published, or None once that is gone.
        claim: the open claim that is about to consume the owner; meanwhile nobody finds it.
    """

    order: int
    owner: OwnerKey | None
    claim: int | None = None


class Bound(NamedTuple):
    """Result of `bind`."""

    sessions: SessionIndex
    is_bound: bool
    displaced: OwnerKey | None


@dataclass(frozen=True)
class SessionIndex:
    """Session key to binding, oldest publication first."""

    bindings: Mapping[str, Binding] = field(default_factory=dict)

    def bound(self, session: str) -> OwnerKey | None:
        """Returns the owner that the session is bound to, unless it is being consumed."""
        binding = self.bindings.get(session)
        return binding.owner if binding is not None and binding.claim is None else None


def bind(index: SessionIndex, session: str, order: int, owner: OwnerKey) -> Bound:
    """Returns the index after a request published: only a larger order replaces (SES-01).

    Raises:
        InvariantError: if another owner was published under the same order.
    """
    old = index.bindings.get(session)
    if old is not None and order <= old.order:
        if order == old.order and old.owner not in (owner, None):
            raise InvariantError(f"session index: two owners were published under order {order}")
        return Bound(index, False, None)
    rest = {k: v for k, v in index.bindings.items() if k != session}
    return Bound(
        _pruned(SessionIndex({**rest, session: Binding(order, owner)})),
        True,
        None if old is None else old.owner,
    )


def claim_binding(index: SessionIndex, session: str, claim: int) -> SessionIndex:
    """Returns the index with a binding set aside for the claim that consumes its owner."""
    return _with(index, session, replace(index.bindings[session], claim=claim))


def restore_binding(index: SessionIndex, session: str, claim: int) -> SessionIndex:
    """Returns the index with the former binding back, if this very claim still holds it (SES-03)."""
    binding = index.bindings.get(session)
    if binding is None or binding.claim != claim:
        return index
    return _with(index, session, replace(binding, claim=None))


def unbind(index: SessionIndex, session: str, owner: OwnerKey) -> SessionIndex:
    """Returns the index after the owner left the catalog; the order stays as the bar for later ones."""
    binding = index.bindings.get(session)
    if binding is None or binding.owner != owner:
        return index
    return _pruned(_with(index, session, Binding(binding.order, None)))


def without_owners(index: SessionIndex) -> SessionIndex:
    """Returns the index after everything catalogued was lost (Q-7)."""
    return _pruned(SessionIndex({k: Binding(b.order, None) for k, b in index.bindings.items()}))


def _with(index: SessionIndex, session: str, binding: Binding) -> SessionIndex:
    return SessionIndex({**index.bindings, session: binding})


def _pruned(index: SessionIndex) -> SessionIndex:
    """Returns the index with at most MAX_UNBOUND orders without an owner, the oldest forgotten first."""
    unbound = sorted((b.order, k) for k, b in index.bindings.items() if b.owner is None)
    if len(unbound) <= MAX_UNBOUND:
        return index
    gone = {k for _, k in unbound[: len(unbound) - MAX_UNBOUND]}
    return SessionIndex({k: b for k, b in index.bindings.items() if k not in gone})
