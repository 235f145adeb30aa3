"""What a `doctor` that was killed left behind: the corner in which it tried things out."""

from __future__ import annotations

import re
import secrets

from asyncckpt.doctor.probes import NAMES
from asyncckpt.storage.garbage import PROBE
from asyncckpt.storage.temporaries import Temporary

_CORNER = re.compile(r"\.asyncckpt-doctor-[0-9a-f]{12}\Z")


def corner_name() -> str:
    """Return a new name for a corner."""
    return f".asyncckpt-doctor-{secrets.token_hex(6)}"


def is_corner(name: str) -> bool:
    """Whether a directory is called as `corner_name` has it."""
    return _CORNER.match(name) is not None


PROBES = Temporary(kind=PROBE, who="doctor", is_named=is_corner, may_hold=NAMES.__contains__)
