"""Names of the things the planner talks about: row ids, sentinels and kinds.

Owns: the NewTypes and enumerations that every other planner file shares. Owns no data and no rule.
An id is a row of one `PhysicalState`; it stays valid while the row's generation is unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NewType

OwnerId = NewType("OwnerId", int)
CheckpointId = NewType("CheckpointId", int)
ImageId = NewType("ImageId", int)
RunId = NewType("RunId", int)
Generation = NewType("Generation", int)
Revision = NewType("Revision", int)

NO_OWNER: Final = -1
NO_IMAGE: Final = -1
NO_SLOT: Final = -1
NO_POOL: Final = -1
NO_EXTENT: Final = -1
NO_CLASS: Final = -1


class OwnerKind(IntEnum):
    """What an owner row is (C-2). Only PRIVATE and SHARED rows can ever be victims (T-2)."""

    FREE = 0
    ACTIVE = 1
    PRIVATE = 2
    SHARED = 3


class CheckpointKind(IntEnum):
    """Why a checkpoint exists (C-3)."""

    SESSION_ENDPOINT = 0
    TURN_CLOSURE = 1
    RESPONSE_REPLAY = 2
    LONG_ANCHOR = 3
    SHARED_STABLE_PREFIX = 4


class Tier(IntEnum):
    """Where replicas are; a bit set, so BOTH is DEVICE | HOST."""

    DEVICE = 1
    HOST = 2
    BOTH = 3


@dataclass(frozen=True, order=True)
class CheckpointRef:
    """Identity of one checkpoint across revisions: owner row with its generation, kind and ordinal (X-8).

    Singletons have ordinal 0; long anchors have unique ordinals of their own.
    """

    owner: OwnerId
    generation: Generation
    kind: CheckpointKind
    ordinal: int
