"""Owns what every owner's tokens are: the exact identity behind each checkpoint, and its shortlist keys.

It proves a match (C-1, C-6) and never guesses one: keys only narrow. It does not own placements; whether a
checkpoint is still valid is asked of the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ninfer_jax.digests import PrefixDigests, make_digests
from ninfer_jax.identity import PromptIdentity, equal_up_to
from ninfer_jax.program.history import Segment
from ninfer_jax.reuse import PrefixKey


@dataclass(frozen=True, eq=False)
class KnownTokens:
    """The tokens of one owner, as far as its deepest checkpoint needs them."""

    identity: PromptIdentity
    digests: PrefixDigests
    history: tuple[Segment, ...]  # the steps that ran over them (C-9)


class IdentityBook:
    """The only holder of owners' tokens, by owner row and generation."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], KnownTokens] = {}

    def __len__(self) -> int:
        return len(self._known)

    def learn(
        self, owner: int, generation: int, identity: PromptIdentity, history: Sequence[Segment]
    ) -> None:
        """Sets what an owner's tokens are and how they were executed."""
        known = self._known.get((owner, generation))
        same = known is not None and known.identity is identity
        digests = known.digests if known is not None and same else make_digests(identity)
        self._known[owner, generation] = KnownTokens(identity, digests, tuple(history))

    def keep_only(self, alive: set[tuple[int, int]]) -> None:
        """Forgets every owner that is gone."""
        for gone in self._known.keys() - alive:
            del self._known[gone]

    def known(self, owner: int, generation: int) -> KnownTokens:
        """Returns the tokens of an owner."""
        return self._known[owner, generation]

    def key(self, owner: int, generation: int, frontier_tokens: int) -> PrefixKey:
        """Returns the shortlist key of an owner's prefix."""
        return self._known[owner, generation].digests.key(frontier_tokens)

    def matches(self, owner: int, generation: int, frontier_tokens: int, prompt: PromptIdentity) -> bool:
        """Returns whether a prompt is exactly this owner's up to a frontier."""
        known = self._known.get((owner, generation))
        return known is not None and equal_up_to(known.identity, prompt, frontier_tokens)
