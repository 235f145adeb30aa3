"""The mappings of a tree, and whether the index can hold their keys."""

from __future__ import annotations

from collections.abc import Iterator

from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.format.tree import MAX_KEY_CHARS, Node, Path, fqn_of

_MAX_KEY = (1 << 63) - 1


def check_keys(tree: Node) -> None:
    """Refuse keys that the index cannot hold; part of making a plan.

    Raises:
        UnsupportedLeafError: Naming the path.
    """
    for path, node in mappings(tree):
        for key in node[1][::2]:
            fits = -_MAX_KEY <= key <= _MAX_KEY if isinstance(key, int) else len(key) <= MAX_KEY_CHARS and _is_text(key)
            if not fits:
                leaf = fqn_of((*path, key))
                raise UnsupportedLeafError(
                    f"state dict leaf {leaf[:200]!r}: the key {str(key)[:80]!r} is out of range, "
                    "too long or no valid text",
                    leaf=leaf,
                    type_name=type(key).__name__,
                )


def mappings(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield (typed path, node) of `node` and everything below it that is a mapping."""
    if node[0] in ("d", "o"):
        yield path, node
        for key, child in zip(node[1][::2], node[1][1::2], strict=True):
            yield from mappings(child, (*path, key))
    elif node[0] in ("l", "t"):
        for i, child in enumerate(node[1]):
            yield from mappings(child, (*path, i))
    elif node[0] == "r":
        yield from mappings(node[1], path)


def _is_text(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True
