"""How saves and loads use torch.distributed: which rank this is, how ranks meet. Nothing else calls it.

Exceptions are `dcp` and `integrations`, which plug into other libraries that use it; a test holds the list.

A meeting uses the default group's store to see who comes, then a gloo group of its own, which ends with it. The group
is made directly and not by `new_group`: that counts groups per process, so a meeting that one rank alone tries would
leave the ranks' counts apart, and the user's next `new_group` would hang.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from asyncckpt.config import RankInfo, check_rank_info
from asyncckpt.distributed.rendezvous import (
    POLL_S,
    Exchange,
    Meeting,
    Patience,
    Save,
    ranks_disagree,
    refused,
)
from asyncckpt.errors import AsyncCkptError, ConfigError, PlanTimeoutError, SaveFailedError

MIN_TIMEOUT_S = 1.0
"""gloo is given this much although the ranks came at the last moment."""

_WAITS, _ABSENT = "waits", "absent"

LOOK_S, LOOKED_FOR = 0.2, 4
"""How often, and for how many of the ranks that have not come, a rank looks where they are. Chosen, not measured."""

APART_S = 2.0
"""A rank that has waited elsewhere for so long does not come: it waits for this one. Chosen, not measured: a rank that
goes from one save's meeting to another's is at neither for longer than the other ranks are."""

SILENT_S = 5.0
"""How long ranks may say nothing, when a meeting has broken down, before they are named. Chosen: gloo tells at once."""


def find_rank_info(given: RankInfo | None, environ: Mapping[str, str] | None = None) -> RankInfo:
    """Return `given`, else the default process group's rank, else torchrun's environment, else 0 of 1.

    Raises:
        ConfigError: No RankInfo; an unreadable environment; or a rank outside its world.
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
    """Which rank of how many this process is for a checkpointer, and in which default process group.

    Args:
        given: The user's rank; it stays, whatever process group there is.

    Attributes:
        rank: When this was made; `is_current` looks again.

    Raises:
        ConfigError: As `find_rank_info`.
    """

    def __init__(self, given: RankInfo | None) -> None:
        self._given, self.rank = given, find_rank_info(given)
        group = _default_group()
        self._group = None if group is None else weakref.ref(group)

    def is_current(self) -> bool:
        """Whether this process is still this rank, in this process group.

        A process group that was destroyed still counts until another one is made. One that is made for the ranks that
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
    """Whether a default process group of several ranks is there, in which code of the user's may wait for them."""
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def _default_group() -> Any:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def find_exchange(rank: RankInfo) -> GroupExchange | None:
    """Return the exchange of the default process group, or None where there is none that has just these ranks."""
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
        rank: Of this process in that group.
        store: The group's store.
    """

    def __init__(self, rank: RankInfo, store: Any) -> None:
        self._rank, self._store = rank, store

    def meet(self, name: str, call: str, about: Save | None = None) -> GroupMeeting:
        """Return the meeting called `name`, which is used once."""
        return GroupMeeting(self._rank, self.part(name), call, self._whereabouts(about))

    def meet_next(self, series: str, call: str, about: Save | None = None) -> GroupMeeting:
        """As of `Exchange`; ranks count in the store, which goes as far as they do.

        A meeting at which ranks have waited in vain is passed over: so a rank that has missed one is in step again. But
        that of a save only if one of them waits for this rank again.
        """
        counts = self.part(series)
        try:
            while True:
                number = counts.add(f"calls/{self._rank.rank}", 1)
                meeting = self.meet(f"{series}-{number}", call, about)
                if not meeting.is_given_up() or (about is not None and not meeting.is_waited_for_elsewhere()):
                    return meeting
        except RuntimeError as error:  # DistStoreError, DistNetworkError
            raise SaveFailedError(
                f"the process group's store is gone: {error}", code="exchange", detail=str(error)[:1000]
            ) from error

    def say_absent(self, sequence: int, reason: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: so are the others
            self._whereabouts(Save("", sequence)).say(f"{_ABSENT} {sequence} {reason[:500]}")

    def _whereabouts(self, about: Save | None) -> Whereabouts:
        return Whereabouts(self._rank.rank, self.part("whereabouts"), about)

    def part(self, name: str) -> Any:
        """Return the part of the store that is called `name`."""
        # torchrun's own store may outlive the ranks that it restarts: what those wrote must not be met again. Else the
        # store is rank 0's, and new; agents of several nodes count differently how often they have restarted theirs.
        outlives = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if outlives else "0"
        return PrefixStore(f"asyncckpt/{attempt}/{name}", self._store)


class Whereabouts:
    """Where each rank waits for the others in a save, for those that wait for it elsewhere.

    Args:
        rank: This one.
        store: Of all of them, for this alone.
        about: The save that this rank comes to; None: it comes to something else, and nobody needs to know.
    """

    def __init__(self, rank: int, store: Any, about: Save | None) -> None:
        self._rank, self._store, self._about = rank, store, about
        self._seen: dict[int, tuple[str, float]] = {}
        self._next_look = 0.0

    def say(self, text: str) -> None:
        """Say it, in the place of what this rank said before."""
        if self._about is not None:
            self._write(f"{self._rank}", text)

    def arrive(self) -> None:
        """Say that this rank waits."""
        if self._about is not None:
            self._write(f"apart/{self._rank}", "")
            self.say(self._here(self._about))

    def waits_here(self, ranks: Iterable[int]) -> bool:
        """Return whether one of these ranks waits for others in a save to the same path."""
        path = None if self._about is None else self._about.path
        return any(self._where(rank)[0::2] == (_WAITS, path) for rank in ranks)

    def look_for(self, missing: Callable[[], Sequence[int]]) -> None:
        """Look now and then where the ranks are that have not come.

        Raises:
            RanksDisagreeError: One has waited elsewhere for `APART_S`, or says that this one has.
            SaveFailedError: One does not come to this save at all (code "withdrawn").
        """
        now, about = time.monotonic(), self._about
        if about is None or now < self._next_look:
            return
        self._next_look = now + LOOK_S
        told, _, said = self._read(f"apart/{self._rank}").partition("\0")
        if told == self._here(about):
            number, _, path = said.partition(" ")
            self._end(about, int(number), path)
        for rank in missing()[:LOOKED_FOR]:
            there = self._read(f"{rank}")
            if self._seen.get(rank, ("", 0.0))[0] != there:
                self._seen[rank] = there, now
            kind, sequence, rest = self._where(rank)
            if kind == _ABSENT and sequence >= about.sequence:
                raise refused(rank, rest)
            if kind == _WAITS and rest != about.path and now - self._seen[rank][1] >= APART_S:
                self._write(f"apart/{rank}", f"{there}\0{self._rank} {about.path}")
                self._end(about, rank, rest)

    def _end(self, about: Save, rank: int, path: str) -> NoReturn:
        first, second = sorted([(self._rank, about.path), (rank, path)])
        raise ranks_disagree("path", first, second, about.path)

    @staticmethod
    def _here(about: Save) -> str:
        return f"{_WAITS} {about.sequence} {about.path}"

    def _write(self, key: str, text: str) -> None:
        self._store.set(key, text.encode("utf-8", "surrogateescape"))

    def _read(self, key: str) -> str:
        return bytes(self._store.get(key)).decode("utf-8", "surrogateescape") if self._store.check([key]) else ""

    def _where(self, rank: int) -> tuple[str, int, str]:
        kind, _, rest = self._read(f"{rank}").partition(" ")
        sequence, _, rest = rest.partition(" ")
        return kind, int(sequence or 0), rest


class GroupMeeting(Meeting):
    """A meeting by a store and a gloo group of its own."""

    def __init__(self, rank: RankInfo, store: Any, call: str, whereabouts: Whereabouts) -> None:
        self._rank, self._store, self._call, self._whereabouts = rank, store, call, whereabouts
        self._group: Any = None
        self._one_machine = self._has_left = False
        self._failure: SaveFailedError | None = None
        """The ranks have lost each other: what every later call raises."""

    def refuse(self, reason: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: so are the others
            if not self._store.check(["refused"]):  # else this rank has heard it, and whose failure it was
                self._store.set("refused", f"{self._rank.rank} {reason[:500]}")

    def is_given_up(self) -> bool:
        """Whether ranks have waited in vain for others to come.

        Raises:
            RuntimeError: The store is gone.
        """
        return bool(self._store.check(["given up"]))

    def is_waited_for_elsewhere(self) -> bool:
        """Whether a rank that has waited here in vain waits for others in a save to the same path."""
        missing = self._given_up_for()
        others = [rank for rank in range(self._rank.world_size) if rank not in missing]
        return self._whereabouts.waits_here(others[:LOOKED_FOR])

    def _given_up_for(self) -> list[int]:
        """Return the ranks that others have waited for in vain."""
        return [int(one) for one in self._store.get("given up").split()] if self.is_given_up() else []

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
            self._failure = self._broken_down(error)
            raise self._failure from error

    def _broken_down(self, error: Exception) -> SaveFailedError:
        """Return the error of a meeting that has lost ranks, or that one of them has refused."""
        lost: list[int] = []
        # IMPORTANT: first: ranks that wait for this one learn of it by its connections, which end with the group.
        self._group = None
        seen: BaseException | None = error
        while seen is not None:
            traceback.clear_frames(seen.__traceback__)
            seen = seen.__cause__
        with contextlib.suppress(RuntimeError):
            try:
                self._look_for_refusal()  # it says why
            except SaveFailedError as refusal:
                return refusal
            lost = self._lost()
        who = f"ranks {lost[:20]} have ended, or hang," if lost else f"rank {self._rank.rank} lost the others"
        return SaveFailedError(
            f"{who} while the ranks agreed on the save: {error}",
            code="exchange",
            rank=lost[0] if len(lost) == 1 else None,
            detail=str(error)[:1000],
        )

    def _lost(self) -> list[int]:
        """Return the ranks that say nothing more, else those that left early; none when that cannot be told.

        The first that has lost the others finds it out for all: thousands would ask the store for thousands.
        """
        store, world_size = self._store, self._rank.world_size
        self._leave("lost")
        n_left = store.add("left", 1)
        until = time.monotonic() + SILENT_S * (1 if n_left == 1 else 2)
        while time.monotonic() < until and not (n_left == 1 and store.add("left", 0) >= world_size - 1):
            if store.check(["gone"]):
                return [int(rank) for rank in store.get("gone").split()]
            time.sleep(POLL_S)
        if n_left > 1:
            return []
        said = {r: bytes(store.get(f"left/{r}")) for r in range(world_size) if store.check([f"left/{r}"])}
        gone = [r for r in range(world_size) if r not in said] or [r for r, how in said.items() if how != b"lost"]
        store.set("gone", " ".join(map(str, gone)))
        return gone

    def _leave(self, how: str) -> None:
        """Say that this rank goes: by itself ("closed"), or because it has lost others ("lost")."""
        if not self._has_left:
            self._has_left = True
            self._store.set(f"left/{self._rank.rank}", how)

    def _arrive(self, deadline: float) -> None:
        """Wait for all ranks, by the store alone."""
        store, world_size = self._store, self._rank.world_size
        patience = Patience(self._call, deadline, first=True)
        self._look_for_refusal()
        here = f"on/{machine()}"
        store.add(here, 1)
        store.set(f"here/{self._rank.rank}", "1")
        if store.add("count", 1) == world_size:
            store.set("all", "1")
        self._whereabouts.arrive()
        try:
            self._wait_for_all(patience)
        finally:
            self._whereabouts.say("")
        self._one_machine = store.add(here, 0) == world_size

    def _wait_for_all(self, patience: Patience) -> None:
        store, world_size = self._store, self._rank.world_size

        def missing() -> list[int]:
            return [r for r in range(world_size) if not store.check([f"here/{r}"])]

        while not store.check(["all"]):
            self._look_for_refusal(patience)
            self._whereabouts.look_for(missing)
            try:
                patience.wait(missing)
            except PlanTimeoutError as error:
                who = " ".join(map(str, error.missing_ranks))
                store.set("given up", who)
                self.refuse(f"it waited {patience.waited_s:.0f} s for ranks {who[:100]} and gave up")
                raise

    def _look_for_refusal(self, patience: Patience | None = None) -> None:
        if self._store.check(["refused"]):
            missing = self._given_up_for()
            if patience is not None and missing and self._rank.rank not in missing:  # it has waited for them, too
                raise patience.too_late(missing)
            rank, _, reason = self._store.get("refused").decode(errors="replace").partition(" ")
            raise refused(int(rank), reason)

    def broadcast(self, message: torch.Tensor, ranks: Sequence[int], root: int, deadline: float) -> None:
        """Send `message` from one rank to some others, who get it in theirs. After a `gather`; these ranks call it.

        Each passes it on along a binomial tree. Ranks that take part in several broadcasts do so in one order on all.

        Args:
            message: Bytes on the CPU, contiguous, of the same length on all of them.
            ranks: The ranks, this one among them, in one order on all of them.
            root: The one that has the message.
            deadline: `time.monotonic()` by which this rank's part must have ended.

        Raises:
            SaveFailedError: A rank has refused (code "withdrawn", its rank and reason), is gone, or is too late.

        Blocks: until this rank's part is done, at most until `deadline`.
        """
        if self._failure is not None:
            raise self._failure
        at, n_ranks = ranks.index(root), len(ranks)
        place = (ranks.index(self._rank.rank) - at) % n_ranks  # of this rank in the tree: the root is 0
        low = place & -place if place else 1 << n_ranks.bit_length()
        parent = ranks[(place - low + at) % n_ranks] if place else None
        below = [place + (1 << n) for n in range(low.bit_length() - 1) if place + (1 << n) < n_ranks]
        try:
            self._pass_on(message, parent, [ranks[(child + at) % n_ranks] for child in reversed(below)], deadline)
        except RuntimeError as error:
            self._failure = self._broken_down(error)
            raise self._failure from error

    def _pass_on(self, message: torch.Tensor, parent: int | None, children: Sequence[int], deadline: float) -> None:
        # IMPORTANT: a frame of its own, which `_broken_down` clears: what is being sent keeps the connections open.
        timeout = timedelta(seconds=max(deadline - time.monotonic(), MIN_TIMEOUT_S))
        if parent is not None:
            self._group.recv([message], parent, 0).wait(timeout)
        sent = [self._group.send([message], child, 0) for child in children]
        for work in sent:
            work.wait(timeout)

    def abort(self, reason: str) -> None:
        """End the meeting for all ranks, which learn why: they may wait for this one. Nothing after it has failed."""
        if self._failure is None:
            self.refuse(reason)
            self._group, self._failure = None, refused(self._rank.rank, reason)

    def close(self) -> None:
        if self._group is not None:
            with contextlib.suppress(RuntimeError):
                self._leave("closed")  # before the others lose the connections
        self._group = None


def machine() -> str:
    """Return what tells this machine, as its processes see it, from others: boot, network and process namespaces."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}-{os.stat('/proc/self/ns/pid').st_ino}"


def _all_gather(group: Any, rank: RankInfo, payload: bytes, deadline: float) -> list[bytes]:
    """Gather bytes of different lengths. Without numpy, which `all_gather_object` needs."""
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
    """Return a gloo group that belongs to nobody else.

    Args:
        store, rank, world_size: Of the group.
        deadline: `time.monotonic()` by which it must be there.
        one_machine: All its ranks are on this one.

    Raises:
        RuntimeError: It has not come about.

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
