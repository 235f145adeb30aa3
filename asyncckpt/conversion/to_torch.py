"""The targets `torch` and `dcp`: archives that `torch.load(weights_only=True)` and stock `dcp.load` read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from asyncckpt.conversion.holding import TOP, Holding, containers, forms_lost, listed, ordered_lost, refuse_long_keys
from asyncckpt.conversion.outline import Outline
from asyncckpt.conversion.pieces import OutputFile, Target
from asyncckpt.conversion.torch_image import Pieces, TorchImage
from asyncckpt.conversion.torch_views import as_it_was
from asyncckpt.errors import DuplicateNameError
from asyncckpt.format.archive import Mixed, Payload, torch_archive
from asyncckpt.format.dcp_items import is_terminal, items_of
from asyncckpt.format.dcp_metadata import bytes_entry, index_record, metadata_pickle, storage_record, tensor_entry
from asyncckpt.format.names import DCP_METADATA_NAME
from asyncckpt.format.pickle_image import NotPickledError, PickleImage
from asyncckpt.format.records import Record
from asyncckpt.format.tree import Node, Path, fqn_of, leaves
from asyncckpt.planning.containers import is_counter
from asyncckpt.planning.keys import mappings


def check_torch(outline: Outline) -> Holding:
    """Say what a file that `torch.load(weights_only=True)` reads cannot hold of the outline, and what it changes."""
    holding = _check_pickles(outline)
    holding.changed += forms_lost(containers(outline.tree), kept=("Counter",))
    return holding


def _check_pickles(outline: Outline) -> Holding:
    holding = Holding()
    for path, node in leaves(outline.tree):
        if node[0] == "O":
            fqn = fqn_of(path)
            try:
                TorchImage(_shape_of(outline), outline.objects, lambda number: ()).content_of(
                    as_it_was(outline, node, path)
                )
            except NotPickledError as error:
                holding.cannot[fqn] = f"torch.load(weights_only=True) does not read {error}"
    refuse_long_keys(outline, holding)
    arrays = [fqn for fqn, node in outline.leaves() if node[0] == "N"]
    if arrays:
        holding.changed.append(f"numpy arrays became tensors: {listed(arrays)}")
    for path, node in mappings(outline.tree):
        if node[0] == "o" and node[2] is not None:
            try:
                PickleImage(_shape_of(outline), outline.objects, lambda number: b"").of_node(("o", (), node[2]))
            except NotPickledError as error:
                holding.unversioned.add(fqn_of(path))
                name = fqn_of(path) or TOP
                holding.changed.append(f"the _metadata of {name}, which holds {error}, is not kept")
    return holding


def check_dcp(outline: Outline) -> Holding:
    """The same of a DCP directory, which flattens as `torch.distributed.checkpoint` does.

    Raises:
        DuplicateNameError: Keys that are a number and a text become one.
    """
    _refuse_one_text(outline)
    holding = _check_pickles(outline)
    for fqn, why in holding.cannot.items():
        holding.cannot[fqn] = why.replace("torch.load(weights_only=True) does not read", "no item holds")
    numbers, empty, lacking = set(), set(), set()
    apart = list(_containers(outline.tree, ()))
    lists = {fqn_of(path) for path, node in apart if node[0] == "l"}
    for path, node in apart:
        if node[0] == "l":
            continue
        name = fqn_of(path) or TOP
        if any(type(key) is not str for key in node[1][::2]):
            numbers.add(name)
        if not node[1]:
            empty.add(name)
            lacking |= {fqn_of(path[:n]) for n, key in enumerate(path) if n and type(key) is int} & lists
    holding.changed += [f"keys that are no texts became texts in: {listed(sorted(numbers))}"] if numbers else []
    holding.changed += ordered_lost(apart) + forms_lost(_with_forms_lost(outline, apart))
    holding.changed += [f"empty dicts are not kept: {listed(sorted(empty))}"] if empty else []
    if lacking:
        holding.changed.append(f"lists are gone, or lack members, where empty dicts were: {listed(sorted(lacking))}")
    untied = sorted(_untied(outline))
    if untied:
        holding.changed.append(f"tied tensors are stored apart, for each tuple that holds one: {listed(untied)}")
    return holding


def _with_forms_lost(outline: Outline, apart: list[tuple[Path, Node]]) -> list[tuple[Path, Node]]:
    """Return the containers whose type is lost: all that are taken apart, and in the items all but Counters."""
    paths = {path for path, _ in apart}
    return [(at, node) for at, node in containers(outline.tree) if at in paths or not is_counter(node)]


def _refuse_one_text(outline: Outline) -> None:
    """Refuse a dict whose keys are all texts in DCP, and two of them the same."""
    for path, node in _containers(outline.tree, ()):
        texts: set[str] = set()
        for key in node[1][::2] if node[0] != "l" else ():
            if str(key) in texts:
                fqn = fqn_of((*path, key))
                where = outline.contents.path
                said = f"{where}: the keys {str(key)!r} and {key!r} of {fqn_of(path) or TOP} are one in a DCP directory"
                raise DuplicateNameError(f"{said}; give one of them another name (key_map, --rename)", fqn=fqn)
            texts.add(str(key))


def _untied(outline: Outline) -> set[str]:
    """Return the names of the tied tensors that lie in a tuple, which is one item, and elsewhere too."""
    items: dict[int, dict[Path, list[str]]] = {}
    for item in items_of(outline.tree):
        for path, leaf in leaves(item.node):
            if leaf[0] in ("T", "N"):
                whole = item.path if item.node[0] not in ("T", "N") else ()
                items.setdefault(leaf[1], {}).setdefault(whole, []).append(fqn_of((*item.path, *path)))
    return {name for found in items.values() if len(found) > 1 for names in found.values() for name in names}


def _containers(node: Node, path: Path) -> Iterator[tuple[Path, Node]]:
    """Yield (path, node) of the dicts and lists that are taken apart; all others are in an item as they are."""
    if node[0] in ("d", "o"):
        yield path, node
        for key, child in zip(node[1][::2], node[1][1::2], strict=True):
            yield from _containers(child, (*path, key))
    elif node[0] == "l" and not is_terminal(node):
        yield path, node
        for n, child in enumerate(node[1]):
            yield from _containers(child, (*path, n))


def _shape_of(outline: Outline) -> Callable[[int], tuple[str, tuple[int, ...]]]:
    return lambda number: (outline.tensors[number].dtype, outline.tensors[number].global_shape)


def _pickled(outline: Outline, node: Node, long_bytes: Pieces) -> tuple[bytes | Mixed, list[Payload]]:
    """Return a node's pickle, and the storages that belong beside it."""
    image = TorchImage(_shape_of(outline), outline.objects, long_bytes)
    pickle = image.content_of(node)
    return pickle, [Payload(number, outline.nbytes_of(number)) for number in image.storages]


def torch_target(outline: Outline, long_bytes: Pieces) -> Target:
    """Return the pieces of one file as `torch.save` writes it."""
    archive = torch_archive(*_pickled(outline, as_it_was(outline, outline.tree), long_bytes))
    file = OutputFile(name="", pieces=tuple(archive.pieces), crc_at=tuple(archive.crc_at))
    return Target(files=[file], is_directory=False, keeps_nesting=True)


def dcp_target(outline: Outline, long_bytes: Pieces, max_shard_nbytes: int | None) -> Target:
    """Return the pieces of a DCP directory: items in one file, or several of bounded size; the metadata last.

    Tied tensors share their item. Names are those that stock `dcp.load` looks for.
    """
    items = _Items(outline, long_bytes, max_shard_nbytes)
    for item in items_of(outline.tree):
        items.add(item.path, item.node)
    return Target(files=[*items.files(), items.metadata()], is_directory=True)


class _Items:
    """The items of a DCP directory while they are placed."""

    def __init__(self, outline: Outline, long_bytes: Pieces, max_shard_nbytes: int | None) -> None:
        self._outline, self._long_bytes, self._limit = outline, long_bytes, max_shard_nbytes
        self._files: list[tuple[list[bytes | Payload], list[tuple[int, int]]]] = []
        self._length = 0
        self._places: dict[int, tuple[str, int, int]] = {}
        self._entries: dict[str, Record] = {}
        self._paths: dict[str, Path] = {}
        self._storage: dict[Any, Record] = {}

    def add(self, path: Path, node: Node) -> None:
        fqn = fqn_of(path)
        self._paths[fqn] = path
        if node[0] not in ("T", "N"):
            self._entries[fqn] = bytes_entry()
            self._storage[index_record(fqn)] = storage_record(*self._place(node, path))
            return
        tensor, number = self._outline.tensors[node[1]], node[1]
        shape, start = tensor.global_shape, (0,) * len(tensor.global_shape)
        self._entries[fqn] = tensor_entry(tensor.dtype, shape, [(start, shape)])
        if number not in self._places:
            self._places[number] = self._place(node, None)
        self._storage[index_record(fqn, start)] = storage_record(*self._places[number])

    def _place(self, node: Node, pickled: Path | None) -> tuple[str, int, int]:
        """Append an item; return (file, offset, length). `pickled`: where one stands that is not a tensor."""
        if pickled is not None:
            node = as_it_was(self._outline, node, pickled)
        pickle, payloads = _pickled(self._outline, node, self._long_bytes)
        nbytes = sum(payload.nbytes for payload in payloads)
        if not self._files or (self._limit and self._length and self._length + nbytes > self._limit):
            self._files.append(([], []))
            self._length = 0
        pieces, crc_at = self._files[-1]
        archive = torch_archive(pickle, payloads, start=self._length, first_piece=len(pieces))
        pieces += archive.pieces
        crc_at += archive.crc_at
        place = (_name(len(self._files) - 1), self._length, archive.nbytes)
        self._length += archive.nbytes
        return place

    def files(self) -> list[OutputFile]:
        return [
            OutputFile(name=_name(n), pieces=tuple(pieces), crc_at=tuple(crc_at))
            for n, (pieces, crc_at) in enumerate(self._files)
        ]

    def metadata(self) -> OutputFile:
        data = metadata_pickle(self._entries, self._paths, self._storage)
        return OutputFile(name=DCP_METADATA_NAME, pieces=(data,))


def _name(number: int) -> str:
    return f"__0_{number}.distcp"
