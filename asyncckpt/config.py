"""All settings of a checkpointer: frozen, keyword-only, checked when built, also from environment variables.

Precedence: arguments, then `ASYNCCKPT_<FIELD>` from the environment, then the defaults below.
"""

from __future__ import annotations

import difflib
import inspect
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from asyncckpt.basics.storage_options import FIELD, NO_OPTIONS, StorageOptions
from asyncckpt.errors import ConfigError

ENDPOINT_VARIABLE = "ASYNCCKPT_ENDPOINT"
EVENTS_VARIABLE = "ASYNCCKPT_EVENTS"
PREFIX = "ASYNCCKPT_"
MAX_WRITE_THREADS = 64
MAX_FILES_PER_RANK = 256
MAX_SLOTS = 16
MIN_SHARD_NBYTES = 64 * 1024
"""Least `max_shard_bytes`: a header takes some pages of it. Chosen: far below useful values."""

_OTHER_VARIABLES = ("ENDPOINT", "JOB", "ADVERTISE")
"""Names behind `PREFIX` that are no fields: `ENDPOINT_VARIABLE`, `protocol.endpoint.JOB_VARIABLES`, the worker's."""

_TESTS = "TEST_"
_log = logging.getLogger("asyncckpt")
_warned: set[str] = set()


class RankInfo(NamedTuple):
    """This process's rank, and the number of ranks."""

    rank: int
    world_size: int


@dataclass(frozen=True, kw_only=True)
class CheckpointerConfig:
    """Settings of `AsyncCheckpointer` and, where they apply, `SyncCheckpointer`.

    Attributes:
        staging: How the state is copied. "blocking": everything before `save()` returns. "overlap": what attached
            optimizers own is copied during the next forward and backward passes; if no optimizer is attached, that
            holds for the whole state, and the caller must not change a tensor before `fence()` or `staged`. Host
            tensors below 64 KiB are copied before `save()` returns, except where the state is larger than
            `arena_limit_bytes`. "device": what lies on a GPU is first copied there, so that it may change as soon as
            `save()` has returned; if the GPU has no memory for that, and for what lies in host memory, as "auto".
            "auto": "overlap" once an optimizer is attached, except for host memory where torch's threads use every
            core, as copying at once then costs the training less; without an optimizer "blocking". Default: "auto".
        overlap_check: How to detect writes that no version counter shows, in tensors that are copied while the training
            goes on. "sample": compare a window of each tensor at `save()` and after the copy, in the slot and in the
            tensor. That is less than 1 % of the bytes, at most 1 KiB a tensor, and other windows at each save, so that
            all bytes of a row-major tensor take 256 saves, or nbytes / 1,024 where that is more. Of more than 1,024
            tensors (256 on devices) each save samples some, and all bytes take longer; on devices only row-major
            tensors are sampled. This may miss a write. "hash": digest everything, for tests. "off": rely on hooks and
            version counters. Default: "sample".
        slots: Snapshots in memory at the same time, at most. A second slot is allocated only when a save comes while
            the first is still being written. Default: 2.
        on_busy: What `save()` does while every slot is in use: "wait" for one, "skip" this save, or raise an "error".
            Default: "wait".
        slot_timeout_s: Seconds to wait for a slot, or until an earlier save has ended on all ranks, with
            on_busy="wait"; for a save that goes through segments, seconds to wait for one of them to be written. While
            another worker is looked for, `worker_start_timeout_s` longer. Default: 600.0.
        arena_limit_bytes: Upper bound in bytes for all slots of this process together; None: what the machine has. A
            state that does not fit goes through the memory in segments, and its save takes as long as writing. Default:
            None.
        on_worker_loss: "resubmit": after the worker has died, another worker gets the same memory and every save that
            was not committed, and the same futures complete; after a worker that hangs, as "fail". "fail": pending
            saves fail with `WorkerUnavailableError`. Default: "resubmit".
        keep_in_memory: "latest": keep the newest committed snapshot in memory while the next one is staged and written,
            so that a copy or a save that fails loses nothing that was in memory; takes memory for at least two
            snapshots. "none": a slot may be used again as soon as its save has ended. Default: "none".
        events: True: rank 0 writes stalls and step times to `events.jsonl` in the directory that holds the checkpoints,
            and a worker that is started writes the outcomes of saves there; for `asyncckpt report`. Default: False.
        on_error: "warn": log the errors of saves. "raise": `wait()` and `close()` also raise those that were not
            fetched from a future. Default: "warn".
        overwrite: True: a save replaces an older checkpoint at its path once the new one is complete, in one step, so
            that one of the two is there at every instant (without `fsync`, except for a power cut). Default: False.
        fsync: False: skip every fsync. Faster, but a power cut may lose or damage the checkpoint; the manifest records
            it. Default: True.
        layout: Format of the files of tensors. "safetensors", or "dcp": the directory can also be read by
            `torch.distributed.checkpoint.load` and its tools, without this package; values that have no form there are
            refused. Default: "safetensors".
        files_per_rank: Shard files to spread the tensors of a rank over, balanced by bytes, largest first. Default: 1.
        max_shard_bytes: Upper bound in bytes for one shard file: more files are written, and larger tensors are cut
            between rows. None: no limit. Default: None.
        reuse: "auto": tensors that have not changed since the previous save, such as a frozen base model, are not
            written again. They lie in files of their own, to which the next checkpoint has hard links (in an object
            store: copies that the store makes). What is unchanged, checksums of the staged bytes tell. States that go
            through the memory in segments are always written. "off": write everything. Default: "off".
        use_pinned_memory: True: pin the memory that GPU tensors are copied into, once. False: copies are slower, and
            overlapped ones are made by a thread, for which `step()` waits as on the CPU. Default: True.
        use_non_blocking_copy: True: copies from GPUs run while the CPU goes on, and `step()` waits on the GPU. False:
            copies run one after the other and are waited for; overlapped ones are made by a thread, as above. Default:
            True.
        allow_pickle: True: store leaves of types that have no other form as pickles, and let the checkpointer's
            `load()` unpickle. DANGER: anybody who can write to a checkpoint's directory can then run code in the
            process that loads it. Default: False.
        write_threads: Threads that write one save, at least 2; None: the worker decides. Default: None.
        replicated: "check": compare tensors that several ranks hold under one name, in full when the ranks meet, and by
            a rotating sample in every save. "assume": take them for equal. Large ones are split over the ranks, so if
            they differ after all, a checkpoint mixes the values of several ranks. Default: "check".
        plan_timeout_s: Seconds that a save in which the ranks meet waits for the others: the first save, and one of the
            next after a rank holds something new. Default: 60.0.
        hook_timeout_s: Seconds that a commit waits for the `pre_commit` hooks of all ranks. Default: 60.0.
        commit_timeout_s: Seconds after the first rank has staged a save within which all ranks must have; else it fails
            on all of them with `CommitTimeoutError`. A save that all ranks have staged goes on in the worker, although
            `written` has failed. Default: 1800.0.
        worker_timeout_s: Seconds after which a worker that does not answer counts as lost. Default: 10.0.
        worker_start_timeout_s: Seconds to find or start a worker and connect to it. Default: 30.0.
        worker_shutdown_timeout_s: Seconds that `close()` waits for pending saves. Default: 60.0.
        rank_info: `RankInfo(rank, world_size)`; `RankInfo(0, 1)` for code that saves on rank 0 only. None:
            torch.distributed's, else torchrun's environment, else rank 0 of 1, determined at each save and load.
            Default: None.
        storage_options: Options of the object stores that URLs lead to, by obstore's names, such as `endpoint`,
            `region`, `access_key_id`, `allow_http`; what they do not say comes from the environment. The worker gets
            them when the session begins, and keeps them in memory only. Their values are never shown. In the
            environment: a JSON object. Default: {}.
    """

    staging: str = "auto"
    overlap_check: str = "sample"
    slots: int = 2
    on_busy: str = "wait"
    slot_timeout_s: float = 600.0
    arena_limit_bytes: int | None = None
    on_worker_loss: str = "resubmit"
    keep_in_memory: str = "none"
    events: bool = False
    on_error: str = "warn"
    overwrite: bool = False
    fsync: bool = True
    layout: str = "safetensors"
    files_per_rank: int = 1
    max_shard_bytes: int | None = None
    reuse: str = "off"
    use_pinned_memory: bool = True
    use_non_blocking_copy: bool = True
    allow_pickle: bool = False
    write_threads: int | None = None
    replicated: str = "check"
    plan_timeout_s: float = 60.0
    hook_timeout_s: float = 60.0
    commit_timeout_s: float = 1800.0
    worker_timeout_s: float = 10.0
    worker_start_timeout_s: float = 30.0
    worker_shutdown_timeout_s: float = 60.0
    rank_info: RankInfo | None = None
    storage_options: Mapping[str, str] = NO_OPTIONS

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: A field is invalid; names field, value and what is allowed.
        """
        for name, allowed in _CHOICES.items():
            _require(
                getattr(self, name) in allowed, name, getattr(self, name), f"one of {', '.join(map(repr, allowed))}"
            )
        for name, (low, high) in _INTEGERS.items():
            value = getattr(self, name)
            fits = value is None if name in _OPTIONAL and value is None else type(value) is int and low <= value <= high
            _require(fits, name, value, f"an integer from {low} to {high}" + (" or None" if name in _OPTIONAL else ""))
        enough = self.slots >= 2 or self.keep_in_memory == "none"
        _require(enough, "keep_in_memory", self.keep_in_memory, "'none' with slots=1: it takes two")
        for name in _SECONDS:
            value = getattr(self, name)
            _require(type(value) in (int, float) and 0 < value <= _MAX_SECONDS, name, value, "seconds, above 0")
        for name in _SWITCHES:
            _require(type(getattr(self, name)) is bool, name, getattr(self, name), "True or False")
        if self.rank_info is not None:
            check_rank_info(self.rank_info)
        object.__setattr__(self, "storage_options", StorageOptions(self.storage_options))

    @classmethod
    def resolve(
        cls, config: CheckpointerConfig | None, arguments: Mapping[str, Any], environ: Mapping[str, str] | None = None
    ) -> CheckpointerConfig:
        """Combine a config, single fields given as arguments, and the environment.

        Args:
            config: Used instead of environment and defaults; None builds one from them.
            arguments: Fields by name; they override all others.
            environ: Defaults to `os.environ`.

        Raises:
            ConfigError: An unknown field, or an invalid value.
        """
        names = {f.name for f in fields(cls)}
        for name in sorted(set(arguments) - names):
            raise _unknown(name, names)
        if config is None:
            environ = os.environ if environ is None else environ
            _warn_of_unknown(environ, names)
            found = {n: text for n in names if (text := environ.get(PREFIX + n.upper()))}
            config = cls(**{name: _parse(name, text) for name, text in found.items()})
        elif not isinstance(config, cls):
            raise ConfigError(f"config is a {type(config).__name__}, expected CheckpointerConfig", field="config")
        return replace(config, **arguments) if arguments else config


def check_rank_info(info: RankInfo) -> None:
    """Check a `RankInfo`.

    Raises:
        ConfigError: It is a plain tuple, whose order may be confused; or the rank is outside its world.
    """
    fits = isinstance(info, RankInfo) and all(type(n) is int for n in info) and 0 <= info.rank < info.world_size
    _require(fits, "rank_info", info, "asyncckpt.RankInfo(rank, world_size) with 0 <= rank < world_size")


def _warn_of_unknown(environ: Mapping[str, str], names: set[str]) -> None:
    """Log each variable with our prefix that is not known, once per process: it may be misspelt."""
    known = [*(n.upper() for n in sorted(names)), *_OTHER_VARIABLES]
    for name in sorted(n.removeprefix(PREFIX) for n in environ if n.startswith(PREFIX)):
        if name not in known and name not in _warned and not name.startswith(_TESTS):
            _warned.add(name)
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {PREFIX}{close[0]}?" if close else ""
            _log.warning("environment variable %s%s is unknown to asyncckpt and ignored%s", PREFIX, name, hint)


def refuse_positional(given: Sequence[object], what: str) -> None:
    """Refuse positional arguments, with a better message than Python's.

    Args:
        given: The positional arguments.
        what: Name of the class or function, for the message.

    Raises:
        ConfigError: There are some; says the name of the first one, if its type tells.
    """
    if not given:
        return
    names = {CheckpointerConfig: "config", str: "endpoint"}
    name = next((name for kind, name in names.items() if isinstance(given[0], kind)), None)
    hint = f"write {what}({name}=...)" if name else f"as in {what}(config=...) or {what}(slots=1)"
    raise ConfigError(
        f"{what} takes arguments by name only, and was given a {type(given[0]).__name__} without one: {hint}",
        field=name or "",
        value=repr(given[0]),
    )


def endpoint_from_environment(environ: Mapping[str, str] | None = None) -> str | None:
    """Return `$ASYNCCKPT_ENDPOINT`; None if it is not set or empty."""
    return (os.environ if environ is None else environ).get(ENDPOINT_VARIABLE) or None


_MAX_SECONDS = 10_000_000.0
_CHOICES = {
    "staging": ("auto", "blocking", "overlap", "device"),
    "overlap_check": ("sample", "off", "hash"),
    "on_busy": ("wait", "skip", "error"),
    "on_worker_loss": ("resubmit", "fail"),
    "keep_in_memory": ("none", "latest"),
    "on_error": ("warn", "raise"),
    "replicated": ("check", "assume"),
    "layout": ("safetensors", "dcp"),
    "reuse": ("off", "auto"),
}
_INTEGERS = {
    "slots": (1, MAX_SLOTS),
    "arena_limit_bytes": (1, 1 << 60),
    "files_per_rank": (1, MAX_FILES_PER_RANK),
    "max_shard_bytes": (MIN_SHARD_NBYTES, 1 << 60),
    "write_threads": (2, MAX_WRITE_THREADS),
}
_OPTIONAL = ("arena_limit_bytes", "max_shard_bytes", "write_threads")
_SECONDS = (
    "slot_timeout_s",
    "plan_timeout_s",
    "hook_timeout_s",
    "commit_timeout_s",
    "worker_timeout_s",
    "worker_start_timeout_s",
    "worker_shutdown_timeout_s",
)
_SWITCHES = ("overwrite", "events", "fsync", "allow_pickle", "use_pinned_memory", "use_non_blocking_copy")
_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _require(holds: bool, name: str, value: Any, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{name}={value!r}: expected {expected}", field=name, value=repr(value))


def _parse(name: str, text: str) -> Any:
    if name == FIELD:
        return _parsed_options(text)
    try:
        if name in _INTEGERS:
            return None if text.lower() == "none" else int(text)
        if name in _SECONDS:
            return float(text)
        if name in _SWITCHES:
            return _FLAGS[text.lower()]
        if name == "rank_info":
            rank, world_size = text.split(",")
            return RankInfo(int(rank), int(world_size))
        return text
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"environment variable {PREFIX}{name.upper()}={text!r}: expected {_expected(name)}", field=name, value=text
        ) from error


def _parsed_options(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # IMPORTANT: neither the text nor the error, which may show secrets
        text = f"environment variable {PREFIX}{FIELD.upper()}: expected a JSON object of texts by name"
        raise ConfigError(text, field=FIELD) from None


def _expected(name: str) -> str:
    if name in _INTEGERS:
        return "a plain integer (of bytes if it is a size), or 'none' for a field that may be None"
    if name in _SECONDS:
        return "a number of seconds"
    if name in _SWITCHES:
        return f"one of {', '.join(_FLAGS)}"
    return "RANK,WORLD_SIZE, such as 0,1"


def check_keywords(kind: type, given: Iterable[str], fields: Iterable[str] = ()) -> None:
    """Check keywords of a constructor that are not its own parameters.

    Args:
        kind: The class.
        given: Names of the keywords.
        fields: Fields of `CheckpointerConfig` that it takes.

    Raises:
        ConfigError: One is unknown.
    """
    taken = frozenset(fields)
    for name in sorted(set(given) - taken):
        own = inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
        raise _unknown(name, taken.union(p.name for p in list(own)[1:] if p.kind is not p.VAR_KEYWORD))


def _unknown(name: str, known: Iterable[str]) -> ConfigError:
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    text = f"unknown field {name!r}; the nearest is {nearest!r}; known are {', '.join(names)}"
    return ConfigError(text, field=name)
