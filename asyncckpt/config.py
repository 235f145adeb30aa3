"""All settings of a checkpointer: frozen, keyword-only, checked when built. The one reader of environment variables.

Precedence: arguments, then `ASYNCCKPT_<FIELD>` from the environment, then the defaults below.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from asyncckpt.errors import ConfigError

ENDPOINT_VARIABLE = "ASYNCCKPT_ENDPOINT"
EVENTS_VARIABLE = "ASYNCCKPT_EVENTS"
PREFIX = "ASYNCCKPT_"
MAX_WRITE_THREADS = 64
MAX_FILES_PER_RANK = 256
MAX_SLOTS = 16
MIN_SHARD_NBYTES = 64 * 1024
"""Of `max_shard_bytes`: a header takes pages of it. Chosen, far below what anybody wants."""

_OTHER_VARIABLES = ("ENDPOINT", "JOB", "ADVERTISE")
"""What follows `PREFIX` and sets no field: `ENDPOINT_VARIABLE`, `protocol.endpoint.JOB_VARIABLES`, the worker's."""

_TESTS = "TEST_"
_log = logging.getLogger("asyncckpt")
_warned: set[str] = set()


class RankInfo(NamedTuple):
    """Which rank of how many this process is."""

    rank: int
    world_size: int


@dataclass(frozen=True, kw_only=True)
class CheckpointerConfig:
    """Settings of `AsyncCheckpointer` and, where they apply, `SyncCheckpointer`.

    Attributes:
        staging: "blocking" copies everything before `save()` returns; "overlap" copies what attached optimizers own
            behind forward and backward, and, without any attached, everything: then the caller changes no tensor
            before `fence()` or `staged`; host tensors below 64 KiB are never left for later. "auto" is "overlap" once
            an optimizer is attached, except for host memory where torch's threads use every core, which costs the
            training less in front; without an optimizer it is "blocking". "device"
            copies what lies on a GPU there first, so that it may change as soon as `save()` has returned; where the GPU
            has no room for that, and for what lies in host memory, it is "auto".
        overlap_check: How to look for writes that no version counter sees, in tensors that are copied behind the
            training. "sample" compares a window of each tensor, at `save()` and after the copy in the slot and in the
            tensor: less than 1 % of the bytes, at most 1 KiB a tensor, other windows at each save, so that all bytes
            of a row-major tensor take 256 saves, or nbytes / 1,024 where that is more. Of more than 1,024 tensors (256
            on devices) each save takes some, and all bytes take longer; on devices only row-major tensors are sampled.
            It is a chance and no proof. "hash" digests everything: for tests. "off" relies on hooks and counters.
        slots: Snapshots in memory at once. A second slot is allocated only when a save comes while the first is still
            being written.
        on_busy: What `save()` does while every slot is in use: "wait" for one, "skip" this save, or "error".
        slot_timeout_s: How long "wait" waits; and a save that goes through segments, for one of them to be written;
            while another worker is looked for, `worker_start_timeout_s` longer.
        arena_limit_bytes: Upper bound for all slots of this process together; None: what the machine has. A state that
            does not fit goes through a part of it in segments: that save takes as long as writing.
        on_worker_loss: "resubmit": when the worker has died, another one gets the same memory and what was not
            committed, and the same futures complete; after a worker that hangs, as "fail": saves that were pending fail
            with `WorkerUnavailableError`.
        keep_in_memory: "latest" never lets go of the newest committed snapshot while the next one is staged and
            written, so that a copy or a save that fails costs nothing that was in memory. It takes room for two
            snapshots at least. "none": a slot may be used again as soon as its save has ended.
        events: True puts stalls and steps of rank 0 into `events.jsonl` in the directory that holds the checkpoints,
            and lets a worker that is started put what becomes of the saves there, for `asyncckpt report`.
        on_error: "warn" logs an error that nobody fetched; "raise" makes `wait()` and `close()` raise it.
        overwrite: True replaces an older checkpoint that stands at the path: when the new one is complete, in one step,
            so that one of the two is there at every instant (without `fsync`: but for a power cut).
        fsync: False skips every fsync: faster, and a power cut may lose or damage the checkpoint. The manifest says so.
        layout: What the files of tensors look like: "safetensors", or "dcp": the directory is also one that
            `torch.distributed.checkpoint.load` and its tools read, with nothing of ours installed. What these have no
            form for is refused.
        files_per_rank: Shard files to spread the tensors over, balanced by bytes, largest first.
        max_shard_bytes: No shard file is larger: more files are written, and larger tensors are cut between rows; None:
            no limit.
        use_pinned_memory: Pins the memory that tensors of GPUs are copied into, once. False: the copies are slower, and
            those behind the training are made by a thread, for which `step()` waits as it does on the CPU.
        use_non_blocking_copy: Copies of GPUs run while the CPU goes on, and `step()` waits on the GPU. False: one after
            the other, each waited for; behind the training by a thread, as above.
        allow_pickle: Stores leaves of types that have no other form as pickles, and lets `load()` of the checkpointer
            unpickle. DANGER: whoever can write into a checkpoint's directory can then run code in who loads it.
        write_threads: Threads that write one save, at least 2; None leaves it to the worker.
        replicated: "check" compares tensors that several ranks hold under one name, whole when the ranks meet and by
            a rotating sample in every save; "assume" takes them for equal: large ones are split over the ranks all
            the same, so that where they differ after all a checkpoint is mixed from what several ranks hold.
        plan_timeout_s: How long a save in which the ranks meet waits for the others: the first one, and one of the next
            after a rank holds something new.
        hook_timeout_s: How long a commit waits for the `pre_commit` hooks of all ranks.
        commit_timeout_s: A save that some rank has not staged so long after the first one ends on all of them, with
            `CommitTimeoutError`. One that all have staged goes on in the worker, although `written` has failed.
        worker_timeout_s: A worker that answers nothing for so long counts as lost.
        worker_start_timeout_s: How long to look for, start and greet a worker.
        worker_shutdown_timeout_s: How long `close()` waits for pending saves.
        rank_info: `RankInfo(0, 1)` for code that saves on rank 0 only; None takes torch.distributed's, else
            torchrun's environment, else 0 of 1, anew at each save and load.
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

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: Naming field, value and what is allowed.
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

    @classmethod
    def resolve(
        cls, config: CheckpointerConfig | None, arguments: Mapping[str, Any], environ: Mapping[str, str] | None = None
    ) -> CheckpointerConfig:
        """Combine a config, single fields given as arguments, and the environment.

        Args:
            config: Taken as a whole, in the place of environment and defaults; None builds one from them.
            arguments: Fields by name; they win.
            environ: Defaults to `os.environ`.

        Raises:
            ConfigError: An unknown field, or an impossible value.
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
    """Refuse what is no rank of a world.

    Raises:
        ConfigError: A plain tuple, which might as well be meant the other way round; or a rank outside its world.
    """
    fits = isinstance(info, RankInfo) and all(type(n) is int for n in info) and 0 <= info.rank < info.world_size
    _require(fits, "rank_info", info, "asyncckpt.RankInfo(rank, world_size) with 0 <= rank < world_size")


def _warn_of_unknown(environ: Mapping[str, str], names: set[str]) -> None:
    """Log each variable that looks like one of ours and is none, once in a process: it may be misspelt."""
    known = [*(n.upper() for n in sorted(names)), *_OTHER_VARIABLES]
    for name in sorted(n.removeprefix(PREFIX) for n in environ if n.startswith(PREFIX)):
        if name not in known and name not in _warned and not name.startswith(_TESTS):
            _warned.add(name)
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {PREFIX}{close[0]}?" if close else ""
            _log.warning("environment variable %s%s has no meaning to asyncckpt and is ignored%s", PREFIX, name, hint)


def refuse_positional(given: Sequence[object], what: str) -> None:
    """Refuse arguments without a name, where Python itself would say only how many it had expected.

    Raises:
        ConfigError: Saying under which name the first one belongs, if that can be told.
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
    """Return `$ASYNCCKPT_ENDPOINT`, or None when it is not set or empty."""
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


def _expected(name: str) -> str:
    if name in _INTEGERS:
        return "a plain integer, in bytes if it is a size, or 'none' where that has a meaning"
    if name in _SECONDS:
        return "a number of seconds"
    if name in _SWITCHES:
        return f"one of {', '.join(_FLAGS)}"
    return "RANK,WORLD_SIZE, such as 0,1"


def check_keywords(kind: type, given: Iterable[str], fields: Iterable[str] = ()) -> None:
    """Check what was given to a constructor by keywords that are none of its own.

    Args:
        kind: The class.
        given: The names.
        fields: What is taken of `CheckpointerConfig`.

    Raises:
        ConfigError: One is neither.
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
