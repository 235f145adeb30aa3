"""What a target cannot hold: named, so that it is refused or left out because the user says so, never dropped."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncckpt.conversion.outline import Outline, pruned
from asyncckpt.conversion.unreadable import readable, unread_of
from asyncckpt.errors import UnsupportedFormatError, UnsupportedLeafError
from asyncckpt.format.tree import Node

VERSIONS_LOST = "the _metadata of modules' state dicts, their versions, are not kept"
_SHOWN = 20


@dataclass(slots=True)
class Holding:
    """What became of the leaves.

    Attributes:
        cannot: By FQN: why the target cannot hold it.
        changed: What it holds in another form, one sentence each.
    """

    cannot: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)


def settled(outline: Outline, holding: Holding, *, to: str, partial: bool) -> Outline:
    """Return what is written: everything, or with `partial` what the target can hold.

    What was not read of the source is added to what `holding` has.

    Raises:
        UnsupportedLeafError: Something cannot be held, and `partial` is False; names all of it.
        UnsupportedFormatError: The same, and some of it was not even read.
    """
    unread = unread_of(outline)
    holding.cannot.update((fqn, found.described()) for fqn, found in unread.items())
    cannot = dict(holding.cannot)
    for fqn in outline.away:
        cannot[fqn] = "it belongs to single ranks (PerRank)"
    if not cannot:
        return outline
    if not partial:
        lines = [f"{fqn}: {why}" for fqn, why in list(cannot.items())[:_SHOWN]]
        more = f"\n  and {len(cannot) - _SHOWN} more" if len(cannot) > _SHOWN else ""
        path = outline.contents.path
        said = (
            f"{path}: {to} cannot hold {len(cannot)} of the leaves; choose others by keys, or leave "
            "them out by partial=True (--partial):\n  " + "\n  ".join(lines) + more
        )
        if unread:
            raise UnsupportedFormatError(said, path=path, found=next(iter(unread.values())).kind)
        raise UnsupportedLeafError(said, leaf=next(iter(cannot)))
    return pruned(readable(outline), lambda fqn: fqn not in cannot)


def listed(names: list[str]) -> str:
    """Return names for a sentence."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def is_text(name: str) -> bool:
    """Whether UTF-8 has a name: lone surrogates, which a pickle may hold, it has not."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def has_versions(node: Node) -> bool:
    """Whether a tree has a module's state dict with `_metadata`."""
    if node[0] == "o" and node[2] is not None:
        return True
    children = node[1][1::2] if node[0] in ("d", "o") else node[1] if node[0] in ("l", "t") else ()
    return any(map(has_versions, children))
