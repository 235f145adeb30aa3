"""The worker of `asyncckpt run`: a child of ours in a session of its own, started again whenever it ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncckpt import launcher
from asyncckpt.cli.worker import ask, status_of
from asyncckpt.errors import AsyncCkptError, WorkerUnavailableError
from asyncckpt.protocol import messages
from asyncckpt.protocol.lifecycle import ENDED

RESTART_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Before the first, second, ... start that follows a death; the last one for all further. Chosen, not measured."""

LIVED_S = 60.0
"""A worker that lived so long is none that dies at its start: the delays begin anew."""

ASK_TIMEOUT_S = 0.5
TAIL_NBYTES = 2000
_TROUBLE = re.compile(rb'^\S+ \S+ (WARNING|ERROR) |"level": "(warning|error)"', re.MULTILINE)
"""In either format of the log (`asyncckpt_worker.logs`)."""


class KeptWorker:
    """See the module. Not thread-safe.

    Args:
        endpoint: Where it listens.
        options: Options of the command, all but the endpoint and the log.
        log_path: Where its log goes.
        say: Tells the user something.

    Raises:
        OSError: The log cannot be opened.
        WorkerUnavailableError: It cannot be started.
    """

    def __init__(self, endpoint: str, options: Sequence[str], log_path: str, say: Callable[[str], None]) -> None:
        self.endpoint, self.log_path = endpoint, log_path
        self._options, self._say = options, say
        self._deaths = 0
        self._again_at = 0.0
        self._rows: list[Mapping[str, Any]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def _start(self) -> None:
        self._log_began = os.path.getsize(self.log_path) if os.path.exists(self.log_path) else 0
        self._process = launcher.start_child(self.endpoint, log_path=self.log_path, options=self._options)
        self._started = time.monotonic()

    @property
    def pid(self) -> int | None:
        """Its process; None while it is dead."""
        return self._process.pid if self._process else None

    def answers(self) -> bool:
        """Whether it serves its endpoint. Blocks: up to `ASK_TIMEOUT_S`.

        Raises:
            WorkerUnavailableError: It has ended; `detail` is what it said, `exit_code` what it ended with.
        """
        assert self._process is not None
        if self._process.poll() is not None:
            said = self._said()
            raise WorkerUnavailableError(
                f"the worker ended with {self._process.returncode}: {said}", endpoint=self.endpoint, detail=said
            )
        try:
            return bool(status_of(self.endpoint, ASK_TIMEOUT_S)["pid"] == self._process.pid)
        except AsyncCkptError:
            return False

    @property
    def exit_code(self) -> int | None:
        """What it ended with the last time, negative for a signal; None while it runs."""
        return self._process.returncode if self._process else None

    def _said(self) -> str:
        with open(self.log_path, "rb") as log:
            log.seek(max(self._log_began, log.seek(0, os.SEEK_END) - TAIL_NBYTES))
            return log.read().decode(errors="replace").strip() or "it said nothing"

    # ---- while the command runs -------------------------------------------------------------------------------------

    def look_after(self) -> float | None:
        """Start it again if it has died, once the delay is over; returns when to look again at the latest."""
        now = time.monotonic()
        if self._process is not None and self._process.poll() is not None:
            self._deaths = 1 if now - self._started >= LIVED_S else self._deaths + 1
            delay_s = RESTART_DELAYS_S[min(self._deaths, len(RESTART_DELAYS_S)) - 1]
            lost = ", and its saves in flight with it" if self._process.returncode else ""
            later = f" in {delay_s:g} s" if delay_s else ""
            self._say(f"worker {self._process.pid} {_ended(self._process.returncode)}{lost}; starting it again{later}")
            self._process, self._again_at = None, now + delay_s
        if self._process is not None:
            return None
        if now >= self._again_at:
            try:
                self._start()
            except (OSError, AsyncCkptError) as error:
                self._deaths += 1
                self._again_at = now + RESTART_DELAYS_S[-1]
                self._say(f"{error}; trying again in {RESTART_DELAYS_S[-1]:g} s")
            else:
                return None
        return self._again_at

    # ---- the end ----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Let it finish what was submitted, then exit."""
        self._signal(signal.SIGTERM)

    def cut_short(self) -> None:
        """Let it exit without finishing anything. Blocks: up to `ASK_TIMEOUT_S`."""
        with contextlib.suppress(AsyncCkptError):
            ask(self.endpoint, lambda number: messages.Drain(id=number, now=True), ASK_TIMEOUT_S)

    def kill(self) -> None:
        """End it at once, and wait for that."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def _signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)  # nothing once it has been reaped

    def has_ended(self) -> bool:
        """Whether it is gone."""
        return self._process is None or self._process.poll() is not None

    def unfinished(self) -> list[str]:
        """Return its saves that have not ended, one text each, by its last answer. Blocks: up to `ASK_TIMEOUT_S`."""
        with contextlib.suppress(AsyncCkptError):
            rows = status_of(self.endpoint, ASK_TIMEOUT_S).get("saves") or ()
            self._rows = [row for row in rows if row.get("phase") not in ENDED]
        return [_described(row) for row in self._rows]

    def log_tells_of_trouble(self) -> bool:
        """Whether its log has warnings or errors."""
        try:
            with open(self.log_path, "rb") as log:
                return _TROUBLE.search(log.read()) is not None
        except FileNotFoundError:
            return False


def _described(row: Mapping[str, Any]) -> str:
    missing = ", ".join(map(str, row.get("missing") or ()))
    what = "a save" if row["step"] is None else f"step {row['step']}"
    return f"{what} at {row['path']}: {row['phase']}" + (f", rank {missing} never came" if missing else "")


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
