"""How saves and loads use torch.distributed: which rank this is, and how ranks meet.

Only this module, `user_group` and `dcp.broadcast_reader` call torch.distributed; `dcp` and `integrations` also import
torch.distributed.checkpoint. A test holds both lists.

A meeting uses the default group's store to wait for all ranks, then a gloo group of its own, which ends with it. The
group is made directly, not by `new_group`: that counts groups per process, so a meeting to which only some ranks come
would leave the ranks' counts different, and the user's next `new_group` would hang.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from asyncckpt.config import RankInfo, check_rank_info
from asyncckpt.distributed.attempts import Attempt, attempt_of
from asyncckpt.distributed.meetings import (
    POLL_S,
    SAVE,
    Exchange,
    Meeting,
    Save,
    WaitTimer,
    ranks_disagree,
    refused,
)
from asyncckpt.errors import AsyncCkptError, ConfigError, PlanTimeoutError, SaveFailedError

MIN_TIMEOUT_S = 1.0
"""The least timeout for gloo, even if the last rank came just before the deadline."""

_WAITS, _ABSENT = "waits", "absent"
"""First word of what a rank publishes in the `WaitRegistry`."""

_APART = "apart"
"""Prefix of keys of the `WaitRegistry`, by rank: a rank that waits for this one in another save."""

_REFUSED, _GIVEN_UP, _COUNT, _ALL, _HERE = "refused", "given up", "count", "all", "here"
"""Keys of a meeting in the store: rank and reason of the first refusal; the ranks that were waited for in vain; how
many ranks have come; set once all have come; prefix of a key per rank that has come."""

_LEFT, _GONE = "left", "gone"
"""Keys of a meeting that has broken down: how many ranks have left it, and prefix of a key per rank that says how
(`_LOST`, `_CLOSED`); the ranks that caused it."""

_LOST, _CLOSED = "lost", "closed"

LOOKUP_PERIOD_S, LOOKUP_RANKS = 0.2, 4
"""How often, and for how many of the missing ranks, a waiting rank looks up where they wait. Chosen, not measured."""

WRONG_MEETING_S = 2.0
"""A rank that has waited in another save for so long will not come: it waits for this one there. Chosen, not measured:
a rank that goes from one save's meeting to the next stays in neither for longer than the other ranks do."""

BRIEF_WAIT_S = 10.0
"""How long a rank that has something to tell the others waits for rank 0. Chosen: rank 0 comes when it makes its first
checkpointer, and ranks do so at about the same time."""

LEAVE_TIMEOUT_S = 5.0
"""After a meeting has broken down, ranks that do not report within this time are named as lost. Chosen: gloo reports
lost connections at once."""


_log = logging.getLogger("asyncckpt")


def find_rank_info(given: RankInfo | None, environ: Mapping[str, str] | None = None) -> RankInfo:
    """Return `given`, else the default process group's rank, else torchrun's environment, else 0 of 1.

    Raises:
        ConfigError: `given` is no RankInfo, the environment cannot be parsed, or the rank is outside its world.
    """
    if given is not None:
        check_rank_info(given)
        return given
    info = _detected(os.environ if environ is None else environ)
    if not 0 <= info.rank < info.world_size:
        raise ConfigError(
            f"RANK={info.rank} with WORLD_SIZE={info.world_size}: set both, as torchrun does, or neither",
            field="rank_info",
            value=repr(info),
        )
    return info


def _detected(environ: Mapping[str, str]) -> RankInfo:
    if dist.is_available() and dist.is_initialized():
        return RankInfo(dist.get_rank(), dist.get_world_size())
    try:
        return RankInfo(int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1")))
    except ValueError as error:
        raise ConfigError(f"RANK or WORLD_SIZE is no number: {error}", field="rank_info") from error


class Membership:
    """The rank of this process for a checkpointer, and the default process group that it was read from.

    Args:
        given: The user's `rank_info`; it overrides any process group.

    Attributes:
        rank: The rank when this was made; see `is_current`.

    Raises:
        ConfigError: As `find_rank_info`.
    """

    def __init__(self, given: RankInfo | None) -> None:
        self._given, self.rank = given, find_rank_info(given)
        find_exchange(self.rank)  # rank 0 begins to answer ranks that communicate before it does
        group = _default_group()
        self._group = None if group is None else weakref.ref(group)

    def is_current(self) -> bool:
        """Whether this process still has this rank, in this process group.

        A destroyed process group still counts until another one is made. A group that is made later for the ranks that
        torchrun's environment has named is no change.

        Raises:
            ConfigError: As `find_rank_info`.
        """
        group, known = _default_group(), None if self._group is None else self._group()
        if group is known is not None or (group is None and self._group is not None):
            return True
        if find_rank_info(self._given) != self.rank:
            return False
        if group is not None:
            if self._group is not None and self.rank.world_size > 1:
                return False
            self._group = weakref.ref(group)
        return True


def has_other_ranks() -> bool:
    """Whether there is a default process group of several ranks, in which the user's code may wait for them."""
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def _default_group() -> Any:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def find_exchange(rank: RankInfo) -> GroupExchange | None:
    """Return the exchange of the default process group; None: there is none, or it has other ranks."""
    if not (dist.is_available() and dist.is_initialized() and dist.is_gloo_available()):
        return None
    if (dist.get_rank(), dist.get_world_size()) != tuple(rank):
        return None
    try:
        store: Any = dist.distributed_c10d._get_default_store()
    except (RuntimeError, ValueError, AttributeError):
        return None
    return None if store is None else GroupExchange(rank, store)


class GroupExchange(Exchange):
    """Meetings of the ranks of the default process group.

    Args:
        rank: Rank of this process in that group.
        store: The group's store.
    """

    def __init__(self, rank: RankInfo, store: Any) -> None:
        self._rank, self._store = rank, store
        with contextlib.suppress(RuntimeError):  # the store is gone: whatever uses it says so
            self._attempt()  # now, so that no rank has to wait until rank 0 communicates

    def meet_next(self, series: str, call: str, about: Save | None = None) -> GroupMeeting:
        """As `Exchange`. The counts are in the store, which lives as long as the group."""
        return GroupMeeting(self, self._rank, series, call, about)

    def announce_absence(self, sequence: int, reason: str) -> None:
        with _best_effort():
            registry = self.wait_registry(Save("", sequence), _brief_wait())
            registry.publish(f"{_ABSENT} {sequence} {reason[:500]}")

    def wait_registry(self, about: Save | None, wait: Callable[[], None]) -> WaitRegistry:
        """Return the registry of the saves in which ranks wait; `wait` as for `part`."""
        return WaitRegistry(self._rank.rank, self.part("whereabouts", wait), about)

    def part(self, name: str, wait: Callable[[], None]) -> Any:
        """Return the part of the store that is called `name`, of this attempt of the job.

        Args:
            name: Name of the part.
            wait: Called while rank 0 has not come: sleeps for a moment; raises an error if there is no time left.

        Raises:
            RuntimeError: The store is gone.
            Exception: From `wait`.
        """
        attempt = self._attempt()
        token = "0" if attempt is None else attempt.token(self._store, wait)
        return PrefixStore(f"asyncckpt/{token}/{name}", self._store)

    def _attempt(self) -> Attempt | None:
        """Return the attempt of the job; None: the store does not outlive it, as it is rank 0's."""
        outlives = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return attempt_of(self._rank, self._store) if outlives else None


def _brief_wait() -> Callable[[], None]:
    """Return a `wait` of `GroupExchange.part` for a rank that only has something to tell the others."""
    timer = WaitTimer(SAVE, time.monotonic() + BRIEF_WAIT_S, first=True)
    return lambda: timer.wait(lambda: [0])


@contextlib.contextmanager
def _best_effort() -> Iterator[None]:
    try:
        yield
    except PlanTimeoutError as error:
        _log.warning("the other ranks cannot be told that this one does not take part: %s", error)
    except RuntimeError:  # the store is gone, and so are the other ranks
        pass


class WaitRegistry:
    """In which save each rank waits for the others: by it, ranks that wait for each other in different saves find out.

    Args:
        rank: This rank.
        store: A part of the store of all ranks, for this purpose only.
        about: The save whose meeting this rank comes to; None: another meeting, and nothing is published.
    """

    def __init__(self, rank: int, store: Any, about: Save | None) -> None:
        self._rank, self._store, self._about = rank, store, about
        self._seen: dict[int, tuple[str, float]] = {}
        self._next_look = 0.0

    def publish(self, text: str) -> None:
        """Publish `text`, in the place of what this rank has published before."""
        if self._about is not None:
            self._write(f"{self._rank}", text)

    def start_waiting(self) -> None:
        """Publish that this rank waits in this save."""
        if self._about is not None:
            self._write(f"{_APART}/{self._rank}", "")
            self.publish(self._here(self._about))

    def waits_here(self, ranks: Iterable[int]) -> bool:
        """Whether one of these ranks waits in a save to the same path."""
        path = None if self._about is None else self._about.path
        return any(self._parse(rank)[0::2] == (_WAITS, path) for rank in ranks)

    def check_missing(self, missing: Callable[[], Sequence[int]]) -> None:
        """Look up, every `LOOKUP_PERIOD_S`, where the missing ranks wait.

        Raises:
            RanksDisagreeError: One has waited in another save for `WRONG_MEETING_S`, or has found that this rank has.
            SaveFailedError: One has published that it does not come to this save (code "withdrawn").
        """
        now, about = time.monotonic(), self._about
        if about is None or now < self._next_look:
            return
        self._next_look = now + LOOKUP_PERIOD_S
        told, _, said = self._read(f"{_APART}/{self._rank}").partition("\0")
        if told == self._here(about):
            number, _, path = said.partition(" ")
            self._raise_disagreement(about, int(number), path)
        for rank in missing()[:LOOKUP_RANKS]:
            there = self._read(f"{rank}")
            if self._seen.get(rank, ("", 0.0))[0] != there:
                self._seen[rank] = there, now
            kind, sequence, rest = self._parse(rank)
            if kind == _ABSENT and sequence >= about.sequence:
                raise refused(rank, rest)
            if kind == _WAITS and rest != about.path and now - self._seen[rank][1] >= WRONG_MEETING_S:
                self._write(f"{_APART}/{rank}", f"{there}\0{self._rank} {about.path}")
                self._raise_disagreement(about, rank, rest)

    def _raise_disagreement(self, about: Save, rank: int, path: str) -> NoReturn:
        first, second = sorted([(self._rank, about.path), (rank, path)])
        raise ranks_disagree("path", first, second, about.path)

    @staticmethod
    def _here(about: Save) -> str:
        return f"{_WAITS} {about.sequence} {about.path}"

    def _write(self, key: str, text: str) -> None:
        self._store.set(key, text.encode("utf-8", "surrogateescape"))

    def _read(self, key: str) -> str:
        return bytes(self._store.get(key)).decode("utf-8", "surrogateescape") if self._store.check([key]) else ""

    def _parse(self, rank: int) -> tuple[str, int, str]:
        kind, _, rest = self._read(f"{rank}").partition(" ")
        sequence, _, rest = rest.partition(" ")
        return kind, int(sequence or 0), rest


class GroupMeeting(Meeting):
    """A meeting that waits for all ranks in a store, then exchanges bytes over a gloo group of its own."""

    def __init__(self, exchange: GroupExchange, rank: RankInfo, series: str, call: str, about: Save | None) -> None:
        self._exchange, self._rank, self._series, self._call, self._about = exchange, rank, series, call, about
        self._store: Any = None
        self._may_wait = True
        self._group: Any = None
        self._one_machine = self._has_left = False
        self._failure: SaveFailedError | None = None
        """The error of a meeting that has broken down: every later call raises it."""

    def refuse(self, reason: str) -> None:
        with _best_effort():
            if self._store is None:
                if not self._may_wait:
                    return  # rank 0 has not come, and the other ranks wait for it, too
                self._find_place(_brief_wait())
            if not self._store.check([_REFUSED]):  # else keep the first refusal: it names the rank that failed first
                self._store.set(_REFUSED, f"{self._rank.rank} {reason[:500]}")

    def _find_place(self, wait: Callable[[], None]) -> None:
        """Find the part of the store in which the ranks meet: the next of the series, as this rank counts.

        A meeting in which ranks have waited in vain is skipped, so that a rank that has missed it is in step again. A
        save's meeting is skipped only if one of these ranks waits again, in a save to the same path.

        Args:
            wait: As for `GroupExchange.part`.
        """
        self._may_wait = False
        part, series = self._exchange.part, self._series
        self._wait_registry = self._exchange.wait_registry(self._about, wait)
        counts = part(series, wait)
        while True:
            number = counts.add(f"calls/{self._rank.rank}", 1)
            self._store = part(f"{series}-{number}", wait)
            if not self._is_given_up() or (self._about is not None and not self._is_waited_for_elsewhere()):
                return

    def _is_given_up(self) -> bool:
        """Whether ranks have waited here in vain for others."""
        return bool(self._store.check([_GIVEN_UP]))

    def _is_waited_for_elsewhere(self) -> bool:
        """Whether a rank that has waited here in vain waits now in another save to the same path."""
        missing = self._awaited_in_vain()
        others = [rank for rank in range(self._rank.world_size) if rank not in missing]
        return self._wait_registry.waits_here(others[:LOOKUP_RANKS])

    def _awaited_in_vain(self) -> list[int]:
        """Return the ranks that others have waited for in vain."""
        return [int(one) for one in self._store.get(_GIVEN_UP).split()] if self._is_given_up() else []

    def gather(self, payload: bytes, deadline: float) -> list[bytes]:
        if self._failure is not None:
            raise self._failure
        try:
            if self._group is None:
                self._arrive(deadline)
                self._group = gloo_group(
                    self._store, self._rank.rank, self._rank.world_size, deadline, self._one_machine
                )
            return _all_gather(self._group, self._rank, payload, deadline)
        except AsyncCkptError:
            raise
        except RuntimeError as error:  # DistError, DistStoreError, DistNetworkError and gloo's own
            self._failure = self._failure_of(error)
            raise self._failure from error

    def _failure_of(self, error: Exception) -> SaveFailedError:
        """Return the error of a meeting that has broken down: a rank has refused, or ranks were lost."""
        lost: list[int] = []
        # IMPORTANT: drop the group first, and what refers to it. Its connections end with it, and by that the ranks
        # that wait for this one learn that it has left.
        self._group = None
        seen: BaseException | None = error
        while seen is not None:
            traceback.clear_frames(seen.__traceback__)
            seen = seen.__cause__
        with contextlib.suppress(RuntimeError):
            try:
                self._raise_refusal()
            except SaveFailedError as refusal:
                return refusal
            lost = self._find_lost_ranks()
        who = f"ranks {lost[:20]} have ended, or hang," if lost else f"rank {self._rank.rank} lost the others"
        return SaveFailedError(
            f"{who} while the ranks agreed on the save: {error}",
            code="exchange",
            rank=lost[0] if len(lost) == 1 else None,
            detail=str(error)[:1000],
        )

    def _find_lost_ranks(self) -> list[int]:
        """Return the ranks that do not report that they have left; else those that closed the meeting; else none.

        The first rank that comes here finds out for all: if thousands of ranks read thousands of keys each, the store
        would be too slow.
        """
        store, world_size = self._store, self._rank.world_size
        self._leave(_LOST)
        n_left = store.add(_LEFT, 1)
        until = time.monotonic() + LEAVE_TIMEOUT_S * (1 if n_left == 1 else 2)
        while time.monotonic() < until and not (n_left == 1 and store.add(_LEFT, 0) >= world_size - 1):
            if store.check([_GONE]):
                return [int(rank) for rank in store.get(_GONE).split()]
            time.sleep(POLL_S)
        if n_left > 1:
            return []
        said = {r: bytes(store.get(f"{_LEFT}/{r}")) for r in range(world_size) if store.check([f"{_LEFT}/{r}"])}
        gone = [r for r in range(world_size) if r not in said] or [
            r for r, how in said.items() if how != _LOST.encode()
        ]
        store.set(_GONE, " ".join(map(str, gone)))
        return gone

    def _leave(self, how: str) -> None:
        """Report that this rank leaves the meeting: by itself (`_CLOSED`), or because it has lost others (`_LOST`)."""
        if not self._has_left:
            self._has_left = True
            self._store.set(f"{_LEFT}/{self._rank.rank}", how)

    def _arrive(self, deadline: float) -> None:
        """Wait for all ranks, using the store only."""
        timer = WaitTimer(self._call, deadline, first=True)
        if self._store is None:
            try:
                self._find_place(lambda: timer.wait(lambda: [0]))
            except RuntimeError as error:  # DistStoreError, DistNetworkError
                raise SaveFailedError(
                    f"the process group's store is gone: {error}", code="exchange", detail=str(error)[:1000]
                ) from error
        store, world_size = self._store, self._rank.world_size
        self._raise_refusal()
        here = f"on/{machine()}"
        store.add(here, 1)
        store.set(f"{_HERE}/{self._rank.rank}", "1")
        if store.add(_COUNT, 1) == world_size:
            store.set(_ALL, "1")
        self._wait_registry.start_waiting()
        try:
            self._wait_for_all(timer)
        except BaseException:
            with contextlib.suppress(Exception):  # what has failed says more
                self._wait_registry.publish("")
            raise
        self._wait_registry.publish("")
        self._one_machine = store.add(here, 0) == world_size

    def _wait_for_all(self, timer: WaitTimer) -> None:
        store, world_size = self._store, self._rank.world_size

        def missing() -> list[int]:
            return [r for r in range(world_size) if not store.check([f"{_HERE}/{r}"])]

        while not store.check([_ALL]):
            self._raise_refusal(timer)
            self._wait_registry.check_missing(missing)
            try:
                timer.wait(missing)
            except PlanTimeoutError as error:
                who = " ".join(map(str, error.missing_ranks))
                store.set(_GIVEN_UP, who)
                self.refuse(f"it waited {timer.waited_s:.0f} s for ranks {who[:100]} and gave up")
                raise

    def _raise_refusal(self, timer: WaitTimer | None = None) -> None:
        if self._store.check([_REFUSED]):
            missing = self._awaited_in_vain()
            if timer is not None and missing and self._rank.rank not in missing:  # this rank waited for them too
                raise timer.too_late(missing)
            rank, _, reason = self._store.get(_REFUSED).decode(errors="replace").partition(" ")
            raise refused(int(rank), reason)

    def broadcast(self, message: torch.Tensor, ranks: Sequence[int], root: int, deadline: float) -> None:
        """Send `message` from rank `root` to `ranks`, which receive it into theirs. Each of `ranks` calls it.

        A `gather` must have come before. Ranks forward the message along a binomial tree. Ranks that take part in
        several broadcasts must do so in the same order.

        Args:
            message: Bytes on the CPU, contiguous, of the same length on all of `ranks`.
            ranks: The ranks, this one among them, in the same order on all of them.
            root: The rank that has the message.
            deadline: `time.monotonic()` by which this rank's part must have ended.

        Raises:
            SaveFailedError: A rank has refused (code "withdrawn", its rank and reason), has ended, or is too late.

        Blocks: until this rank's part is done, at most until `deadline`.
        """
        if self._failure is not None:
            raise self._failure
        at, n_ranks = ranks.index(root), len(ranks)
        place = (ranks.index(self._rank.rank) - at) % n_ranks  # this rank's place in the tree: the root's is 0
        low = place & -place if place else 1 << n_ranks.bit_length()
        parent = ranks[(place - low + at) % n_ranks] if place else None
        below = [place + (1 << n) for n in range(low.bit_length() - 1) if place + (1 << n) < n_ranks]
        try:
            self._pass_on(message, parent, [ranks[(child + at) % n_ranks] for child in reversed(below)], deadline)
        except RuntimeError as error:
            self._failure = self._failure_of(error)
            raise self._failure from error

    def _pass_on(self, message: torch.Tensor, parent: int | None, children: Sequence[int], deadline: float) -> None:
        # IMPORTANT: a frame of its own, which `_failure_of` clears: pending sends keep the group's connections open.
        timeout = timedelta(seconds=max(deadline - time.monotonic(), MIN_TIMEOUT_S))
        if parent is not None:
            self._group.recv([message], parent, 0).wait(timeout)
        sent = [self._group.send([message], child, 0) for child in children]
        for work in sent:
            work.wait(timeout)

    def abort(self, reason: str) -> None:
        """End the meeting for all ranks, and tell them why: they may wait for this one. No-op if it has failed."""
        if self._failure is None:
            self.refuse(reason)
            self._group, self._failure = None, refused(self._rank.rank, reason)

    def close(self) -> None:
        if self._group is not None:
            with contextlib.suppress(RuntimeError):
                self._leave(_CLOSED)  # before the connections end, so that it does not look like a loss
        self._group = None


def machine() -> str:
    """Return an id of this machine as its processes see it: of its boot, and of the network and PID namespaces."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}-{os.stat('/proc/self/ns/pid').st_ino}"


def _all_gather(group: Any, rank: RankInfo, payload: bytes, deadline: float) -> list[bytes]:
    """Gather bytes of different lengths, without numpy, which `all_gather_object` needs."""
    options: Any = dist.distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
    options.timeout = timedelta(seconds=max(deadline - time.monotonic(), MIN_TIMEOUT_S))
    mine = torch.tensor([len(payload)], dtype=torch.int64, device="cpu")
    lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(rank.world_size)]
    group.allgather([lengths], [mine], options).wait()
    counts = [int(n) for n in lengths]
    longest = max(1, *counts)
    padded = torch.frombuffer(bytearray(payload.ljust(longest, b"\0")), dtype=torch.uint8)
    gathered = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in counts]
    group.allgather([gathered], [padded], options).wait()
    return [ctypes.string_at(t.data_ptr(), n) for t, n in zip(gathered, counts, strict=True)]


def gloo_group(store: Any, rank: int, world_size: int, deadline: float, one_machine: bool) -> Any:
    """Return a new gloo group that torch.distributed does not know.

    Args:
        store, rank, world_size: Store of the group, this process's rank in it, and its size.
        deadline: `time.monotonic()` by which all ranks must have connected.
        one_machine: All its ranks are on this machine.

    Raises:
        RuntimeError: The ranks could not connect.

    Blocks: until all ranks have come.
    """
    gloo: Any = dist.ProcessGroupGloo  # its options are not in torch's type stubs
    timeout = timedelta(seconds=max(deadline - time.monotonic(), MIN_TIMEOUT_S))
    if not one_machine:  # as the user's own groups: GLOO_SOCKET_IFNAME, else the host's name
        return gloo(store, rank, world_size, timeout)
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    return gloo(store, rank, world_size, options)
