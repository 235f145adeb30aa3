"""`TensorRule`: which tensors of a checkpoint become which tensors of a target: renamed, stacked, split or joined."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.errors import ConfigError, ShapeMismatchError, UnmatchedTensorsError
from asyncckpt.format.state_tree import TENSOR
from asyncckpt.interop.mapping.made_tensors import AnyTensor, MadeTensor, MappedBox
from asyncckpt.interop.outline import Outline, replaced
from asyncckpt.storage.contents import SavedTensor

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(\*?)\}")
_NUMBER = "0|[1-9][0-9]{0,8}"

_MAX_NAMED = 1000
"""Missing names that an error lists at most."""


@dataclass(frozen=True, slots=True)
class TensorRule:
    """Which tensors of a checkpoint become which tensors of a target.

    Names may have placeholders, such as `layers.{layer}.mlp.experts.{expert}.up_proj.weight`. A placeholder stands for
    one part of a name, between dots, and for the same text in all names of the rule. `{prefix*}` stands for any number
    of parts, each with the dot after it, also for none.

    A placeholder that only the sources have numbers tensors from 0 on, which are stacked along a new dimension. One
    that only the targets have numbers the tensors into which a tensor is cut along that dimension. Several sources are
    joined (`torch.cat`), and for several targets a tensor is split into equal parts, in the order of the names.

        TensorRule("experts.{n}.weight", "experts")                    # experts = torch.stack([...])
        TensorRule(["q.weight", "k.weight", "v.weight"], "qkv.weight")   # qkv = torch.cat([q, k, v])
        TensorRule("{p*}gate_up", ["{p*}{n}.gate", "{p*}{n}.up"])       # for each n: gate, up = gate_up[n].chunk(2)

    Args:
        sources: Names in the checkpoint.
        targets: Names in the target. Either `sources` or `targets` is a single name.
        dim: The dimension along which tensors are joined or split, counted in a tensor that is not stacked.
        stack_dim: The stacked dimension, counted in the stacked tensor.

    Raises:
        ConfigError: An argument is invalid.
    """

    sources: str | Sequence[str]
    targets: str | Sequence[str]
    dim: int = 0
    stack_dim: int = 0
    _numbered_by: str | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sources, targets = _names("sources", self.sources), _names("targets", self.targets)
        for name, value in (("dim", self.dim), ("stack_dim", self.stack_dim)):
            if type(value) is not int or value < 0:
                raise _invalid(self, f"{name}={value!r}: expected an integer that is not negative")
        if len(sources) > 1 and len(targets) > 1:
            raise _invalid(self, "either sources or targets must be a single name")
        sides = [{_placeholders(name) for name in names} for names in (sources, targets)]
        if any(len(side) > 1 for side in sides):
            raise _invalid(self, "all sources must have the same placeholders, and all targets")
        ours, theirs = (next(iter(side)) for side in sides)
        alone = sorted(ours ^ theirs)
        if len(alone) > 1:
            raise _invalid(self, f"only one of {alone} may be in sources or in targets only: it numbers the tensors")
        if alone and alone[0].endswith("*"):
            raise _invalid(self, f"{alone[0]!r} is in sources or in targets only, and stands for no number")
        object.__setattr__(self, "sources", sources)
        object.__setattr__(self, "targets", targets)
        object.__setattr__(self, "_numbered_by", alone[0] if alone else None)

    def inverse(self) -> TensorRule:
        """Return the rule that undoes this one, where the sources of this one have equal sizes."""
        return TensorRule(self.targets, self.sources, self.dim, self.stack_dim)

    @property
    def stacks(self) -> bool:
        """Whether numbered sources are stacked."""
        return self._numbered_by is not None and self._numbered_by in _placeholders(self.sources[0])

    @property
    def unstacks(self) -> bool:
        """Whether a source is cut into numbered targets."""
        return self._numbered_by is not None and not self.stacks

    def pattern(self, source: str) -> re.Pattern[str]:
        """Return the pattern of the names that `source` stands for; the groups are its placeholders."""
        found, at = [], 0
        for match in _PLACEHOLDER.finditer(source):
            name, star = match.groups()
            text = r"(?:[^.]+\.)*" if star else _NUMBER if name == self._numbered_by else r"[^.]+"
            found += [re.escape(source[at : match.start()]), f"(?P<{name}>{text})"]
            at = match.end()
        return re.compile("".join(found) + re.escape(source[at:]))

    def name(self, of: str, bound: Mapping[str, str], number: int) -> str:
        """Return the name `of` with its placeholders replaced by what they stand for."""

        def text(match: re.Match[str]) -> str:
            return str(number) if match[1] == self._numbered_by else bound[match[1]]

        return _PLACEHOLDER.sub(text, of)


def checked_rules(rules: Any) -> list[TensorRule]:
    """Return the rules of an argument.

    Raises:
        ConfigError: It is something else than rules.
    """
    found = list(rules) if isinstance(rules, Iterable) else [rules]
    for one in found:
        if not isinstance(one, TensorRule):
            raise ConfigError(f"rules: found a {type(one).__name__}, expected objects of TensorRule", field="rules")
    return found


def rules_from_json(raw: Any, where: str) -> list[TensorRule]:
    """Return the rules of a JSON text: a list of objects with the arguments of `TensorRule`.

    Raises:
        ConfigError: It is something else; begins with `where`.
    """
    fields = {"sources", "targets", "dim", "stack_dim"}
    if not isinstance(raw, list) or not all(
        isinstance(one, dict) and {"sources", "targets"} <= one.keys() <= fields for one in raw
    ):
        raise ConfigError(
            f"{where}: expected a list of objects with sources and targets, and maybe dim and stack_dim",
            field="rules",
            value=where,
        )
    return [TensorRule(**one) for one in raw]


def apply_rules(
    outline: Outline, rules: Iterable[TensorRule], *, all_must_match: bool = True
) -> tuple[Outline, list[str]]:
    """Return the outline with the tensors that rules make, in the place of those that they are made of.

    A tensor belongs to the first rule that matches its name; tensors that no rule matches stay as they are.

    Args:
        outline: The outline; its tensors are those of the source.
        rules: The rules.
        all_must_match: Whether a rule that matches no name is an error.

    Returns:
        The outline; and sentences about tensors that were stacked, split or joined.

    Raises:
        UnmatchedTensorsError: Some sources of a rule are there, and others are not; or a rule matches no name.
        ShapeMismatchError: Tensors cannot be stacked, joined or split, because of their shapes or dtypes.
        DuplicateNameError: Two tensors would have the same name.
    """
    path = outline.contents.path
    left = {fqn: outline.tensors[node[1]] for fqn, node in outline.leaves() if node[0] == TENSOR}
    arrivals: list[tuple[str, AnyTensor]] = []
    gone: list[str] = []
    missing: list[str] = []
    reshaped: list[str] = []
    n_made = 0
    for rule in rules:
        groups = _groups_of(rule, left)
        if not groups and all_must_match:
            missing += rule.sources
        for group in groups:
            lacking = group.lacking()
            if lacking:
                missing += lacking
                continue
            made = group.made(path)
            arrivals += made
            gone += group.tensors_by_fqn
            if len(made) > 1 or len(group.tensors_by_fqn) > 1 or rule.stacks or rule.unstacks:
                reshaped += group.tensors_by_fqn
                n_made += len(made)
    if missing:
        raise UnmatchedTensorsError(
            f"{path}: rules need {len(missing)} tensors that are not there:\n  {listed_lines(missing)}\nNothing was "
            "written. Correct the rules, or convert a checkpoint that has all of these tensors",
            path=path,
            missing=missing,
            unused=[],
        )
    if not gone:
        return outline, []
    sentences = [f"{len(reshaped)} tensors became {n_made} by rules: {', '.join(reshaped)}"] if reshaped else []
    return replaced(outline, set(gone), arrivals), sentences


def listed_lines(names: Sequence[str]) -> str:
    """Return names for a message, one a line, at most `_MAX_NAMED`."""
    more = [f"and {len(names) - _MAX_NAMED} more"] if len(names) > _MAX_NAMED else []
    return "\n  ".join([*names[:_MAX_NAMED], *more])


class _Group:
    """The tensors that a rule matches whose placeholders stand for the same texts, apart from the number."""

    def __init__(self, rule: TensorRule, bound: Mapping[str, str]) -> None:
        self._rule, self._bound = rule, bound
        self._found: dict[tuple[int, int], str] = {}
        self.tensors_by_fqn: dict[str, SavedTensor] = {}

    def add(self, source: int, number: int, fqn: str, tensor: AnyTensor) -> None:
        """Add the tensor that `rule.sources[source]` stands for."""
        assert isinstance(tensor, SavedTensor), "a tensor that a rule has made"
        self._found[source, number] = fqn
        self.tensors_by_fqn[fqn] = tensor

    def lacking(self) -> list[str]:
        """Return the names of the sources that are not there."""
        sources = self._rule.sources
        numbers = range(1 + max(number for _, number in self._found))
        wanted = ((source, number) for number in numbers for source in range(len(sources)))
        lacking: list[str] = []
        for source, number in wanted:
            if (source, number) not in self._found:
                lacking.append(self._rule.name(sources[source], self._bound, number))
                if len(lacking) > _MAX_NAMED:  # one number may be a billion
                    break
        return lacking

    def made(self, path: str) -> list[tuple[str, AnyTensor]]:
        """Return name and tensor of each target.

        Raises:
            ShapeMismatchError: A shape or dtype does not fit.
        """
        rule, targets = self._rule, self._rule.targets
        if len(self._found) == 1 and len(targets) == 1 and not rule.stacks and not rule.unstacks:
            return [(rule.name(targets[0], self._bound, 0), next(iter(self.tensors_by_fqn.values())))]
        if len(targets) > 1 or rule.unstacks:
            return self._split(path)
        return [(rule.name(targets[0], self._bound, 0), self._joined(path))]

    def _split(self, path: str) -> list[tuple[str, AnyTensor]]:
        rule = self._rule
        ((fqn, saved),) = self.tensors_by_fqn.items()
        wide = saved.global_shape
        at = rule.stack_dim if rule.unstacks else None
        piece, n_parts = list(_without(wide, at)), len(rule.targets)
        is_cut = n_parts > 1
        if (at is not None and not any(wide[at : at + 1])) or (
            is_cut and (rule.dim >= len(piece) or piece[rule.dim] % n_parts)
        ):
            dim = rule.dim if at is None or rule.dim < at else rule.dim + 1
            wanted = [f"a dimension {at} that is not empty"] if at is not None else []
            wanted += [f"a dimension {dim} that can be cut into {n_parts} equal parts"] if is_cut else []
            raise _unfit(path, fqn, wide, " and ".join(wanted))
        if is_cut:
            piece[rule.dim] //= n_parts
        places = _places([piece] * n_parts, 1 if at is None else wide[at], rule.dim if is_cut else None, at)
        origin = (0,) * len(wide)
        return [
            (
                rule.name(rule.targets[part], self._bound, number),
                MadeTensor(saved.fqn, saved.dtype, tuple(piece), sizes, (MappedBox(saved, offsets, origin, sizes),)),
            )
            for number, part, offsets, sizes in places
        ]

    def _joined(self, path: str) -> MadeTensor:
        rule, n_sources = self._rule, len(self._rule.sources)
        fqns = [self._found[0, 0], *(fqn for place, fqn in sorted(self._found.items()) if place != (0, 0))]
        first = self.tensors_by_fqn[fqns[0]]
        at = rule.stack_dim if rule.stacks else None
        dim = rule.dim if n_sources > 1 else None
        ndim = len(first.global_shape)
        if (at is not None and at > ndim) or (dim is not None and dim >= ndim):
            what = f"at least {at} dimensions" if dim is None or dim < ndim else f"a dimension {dim}"
            raise _unfit(path, fqns[0], first.global_shape, what)
        for (source, _), fqn in sorted(self._found.items()):
            other, like = self.tensors_by_fqn[fqn], self.tensors_by_fqn[self._found[source, 0]]
            rest = (_without(other.global_shape, dim), other.dtype)
            if other.global_shape != like.global_shape or rest != (_without(first.global_shape, dim), first.dtype):
                raise _unfit(
                    path,
                    fqn,
                    other.global_shape,
                    f"the shape and dtype of {fqns[0]}, {first.dtype}{list(first.global_shape)}"
                    + ("" if dim is None else f", apart from dimension {dim}"),
                    other.dtype,
                )
        pieces = [self.tensors_by_fqn[self._found[n, 0]].global_shape for n in range(n_sources)]
        n_numbers = len(self._found) // n_sources
        boxes = tuple(
            MappedBox(self.tensors_by_fqn[self._found[part, number]], (0,) * len(sizes), offsets, sizes, at)
            for number, part, offsets, sizes in _places(pieces, n_numbers, dim, at)
        )
        shape = list(first.global_shape)
        if dim is not None:
            shape[dim] = sum(piece[dim] for piece in pieces)
        if at is not None:
            shape.insert(at, n_numbers)
        return MadeTensor(first.fqn, first.dtype, tuple(shape), tuple(shape), boxes)


def _places(
    pieces: Sequence[Sequence[int]], n_numbers: int, dim: int | None, at: int | None
) -> Iterator[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    """Yield the place of each piece in the tensor that is joined of them, or cut into them.

    Args:
        pieces: Shapes of the pieces of one number.
        n_numbers: How many numbers there are.
        dim: The dimension in which the pieces follow each other; None: there is one.
        at: The dimension in which the numbers follow each other; None: there is one.

    Yields:
        Number, index of the piece, and its offsets and sizes in the dimensions of the whole.
    """
    for number in range(n_numbers):
        start = 0
        for part, shape in enumerate(pieces):
            offsets, sizes = [0] * len(shape), list(shape)
            if dim is not None:
                offsets[dim] = start
                start += shape[dim]
            if at is not None:
                offsets.insert(at, number)
                sizes.insert(at, 1)
            yield number, part, tuple(offsets), tuple(sizes)


def _groups_of(rule: TensorRule, left: dict[str, AnyTensor]) -> list[_Group]:
    """Return the groups of tensors that a rule matches, and remove the tensors from `left`."""
    groups: dict[tuple[str, ...], _Group] = {}
    for source, name in enumerate(rule.sources):
        pattern = rule.pattern(name)
        for fqn in [fqn for fqn in left if pattern.fullmatch(fqn)]:
            match = pattern.fullmatch(fqn)
            assert match is not None
            bound = match.groupdict()
            number = int(bound.pop(rule._numbered_by)) if rule.stacks and rule._numbered_by else 0
            key = tuple(bound[name] for name in sorted(bound))
            groups.setdefault(key, _Group(rule, bound)).add(source, number, fqn, left.pop(fqn))
    return list(groups.values())


def _names(side: str, given: Any) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, (list, tuple)) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"TensorRule: {side}={given!r}: expected a name or a list of names", field=side)
    for name in names:
        rest = _PLACEHOLDER.sub("", name)
        found = [match[1] for match in _PLACEHOLDER.finditer(name)]
        if "{" in rest or "}" in rest or len(set(found)) != len(found):
            raise ConfigError(
                f"TensorRule: {side}={name!r}: a placeholder is a name in braces, such as {{layer}} or {{prefix*}}, "
                "and occurs once in a name",
                field=side,
                value=name,
            )
    return names


def _placeholders(name: str) -> frozenset[str]:
    return frozenset(match[1] + match[2] for match in _PLACEHOLDER.finditer(name))


def _without(shape: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
    return tuple(n for d, n in enumerate(shape) if d != dim)


def _invalid(rule: TensorRule, why: str) -> ConfigError:
    return ConfigError(f"TensorRule({rule.sources!r}, {rule.targets!r}): {why}", field="rules")


def _unfit(path: str, fqn: str, shape: tuple[int, ...], wanted: str, dtype: str = "") -> ShapeMismatchError:
    return ShapeMismatchError(
        f"{path}: a rule needs tensor {fqn!r} to have {wanted}; it has {dtype}{list(shape)}. Correct dim, stack_dim or "
        "the names of the rule",
        path=path,
        fqn=fqn,
        saved=list(shape),
        wanted=wanted,
    )
