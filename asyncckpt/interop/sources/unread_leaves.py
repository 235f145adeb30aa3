"""Leaves of another format that cannot be read, such as an `argparse.Namespace`. Their FQNs and classes are known.

The rest of the checkpoint can be read; only a request for one of these leaves is an error.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from asyncckpt.errors import UnsupportedFormatError
from asyncckpt.format.state_tree import OBJECT, fqn_of, leaves
from asyncckpt.storage.contents import Contents

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class UnreadLeaf:
    """Stands for such a leaf in the objects of a source.

    Attributes:
        kind: Its class, such as `argparse.Namespace`, or another description.
        why: Why it cannot be read; empty if the class is the reason.
        tensors: Number of tensors in it, which cannot be read either; None: it is too large to count them.
    """

    kind: str
    why: str = ""
    tensors: int | None = 0

    def described(self) -> str:
        """Return a text such as `argparse.Namespace, not read: 2 tensors in it`."""
        count = f"{self.tensors} tensor{'s' if self.tensors != 1 else ''} in it" if self.tensors else ""
        if self.tensors is None:
            count = "too much in it to look for tensors"
        more = [said for said in (self.why, count) if said]
        return f"{self.kind}, not read" + (f": {', '.join(more)}" if more else "")


def unread_leaves(contents: Contents, numbers: Container[int] | None = None) -> dict[str, UnreadLeaf]:
    """Return the leaves of a checkpoint that cannot be read, by FQN, in the order of the state dict.

    Args:
        contents: The checkpoint.
        numbers: Only objects with these numbers; None: all.
    """
    objects = contents.source.objects if contents.source is not None else ()
    if not any(type(found) is UnreadLeaf for found in objects):
        return {}
    named = ((fqn_of(path), node) for path, node in leaves(contents.ranks[0].structure.tree))
    found = ((fqn, node[1]) for fqn, node in named if node[0] == OBJECT and (numbers is None or node[1] in numbers))
    return {fqn: objects[number] for fqn, number in found if type(objects[number]) is UnreadLeaf}


def unread_error(path: str, found: Mapping[str, UnreadLeaf]) -> UnsupportedFormatError:
    """Return the error for a request for such leaves; its message names the first `_SHOWN` of them."""
    lines = [f"{fqn or 'the top level'}: {what.described()}" for fqn, what in list(found.items())[:_SHOWN]]
    more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return UnsupportedFormatError(
        f"{path}: {len(found)} of the leaves hold objects of classes that are not on the list of what may be read; no "
        "code of them was run, and nothing was changed. Leave them out with keys, or save plain values instead, such "
        "as a state_dict():\n  " + "\n  ".join(lines) + more,
        path=path,
        found=next(iter(found.values())).kind,
    )
