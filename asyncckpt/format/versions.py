"""What every document of the format says of itself: its version, and the fields that a reader must know.

A reader ignores fields that it does not know, except those that the document names in `must`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from asyncckpt.errors import UnsupportedFormatError

MUST = "must"


def check_version(
    document: Mapping[str, Any], key: str, supported: int, *, what: str, known: Collection[str] = ()
) -> None:
    """Prove that this package can read `document`.

    Args:
        document: The decoded map.
        key: The field that holds the version.
        supported: The newest version that this package reads; older ones it reads too.
        what: For messages: "index", "manifest", ...
        known: Fields that a document may demand.

    Raises:
        UnsupportedFormatError: A newer version, or a required field that this version does not know.
        ValueError: No version at all.
    """
    found = document.get(key)
    if type(found) is not int or found < 1:
        raise ValueError(f"{what} version {found!r}")
    if found > supported:
        raise UnsupportedFormatError(
            f"{what} version {found} is newer than this package reads ({supported}); upgrade asyncckpt",
            found=found,
            supported=supported,
        )
    must = list_of(document.get(MUST, ()))
    if not all(type(n) is str for n in must):
        raise ValueError(f"{what}: `{MUST}` is no list of names")
    unknown = sorted(set(must) - set(known))
    if unknown:
        raise UnsupportedFormatError(
            f"{what} needs {unknown[:10]}, which this package does not know; upgrade asyncckpt",
            found=found,
            supported=supported,
        )


def list_of(value: Any) -> Sequence[Any]:
    """Return `value` if it is a list; a map or a text iterates too, and must not pass for one.

    Raises:
        ValueError: It is none.
    """
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{type(value).__name__} in place of a list")
    return value
