"""The command that `asyncckpt run` wraps: in our own process group, with our terminal; our signals are passed on to it.

IMPORTANT: signals are blocked and waited for, never handled: none is lost between two looks, and none interrupts us
between the command's start and the moment from which it would be forwarded.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence

FORWARDED = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2})
ENDING = FORWARDED - {signal.SIGUSR1, signal.SIGUSR2}
_WAITED = FORWARDED | {signal.SIGCHLD}
_RESTORED = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD)
"""Python ignores the first two, and an ignored signal stays ignored in what we start."""

_SI_KERNEL = 0x80
"""sigaction(2): the kernel sent it, which for these signals means the terminal."""

EXIT_NOT_EXECUTABLE = 126
EXIT_COMMAND_NOT_FOUND = 127
EXIT_SIGNAL = 128
"""Plus the signal's number; all three as in POSIX's shell, "Exit Status for Commands"."""


def block_signals() -> None:
    """From now on signals are only seen by `next_signal`."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whoever started us may ignore it; then nobody could be waited for
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)


def next_signal(timeout_s: float) -> signal.struct_siginfo | None:
    """Return the next signal, the end of a child (SIGCHLD) among them, or None after `timeout_s`."""
    return signal.sigtimedwait(_WAITED, max(0.0, timeout_s))


def reached_everybody(code: int, number: int, *, leads_session: bool) -> bool:
    """Whether the terminal has sent this signal to its whole foreground group, the command in it included.

    Args:
        code: `si_code` of the signal.
        number: The signal.
        leads_session: Whether we are the leader of our session: a hangup is told to the leader alone at first.
    """
    return code == _SI_KERNEL and not (number == signal.SIGHUP and leads_session)


class Command:
    """One running command.

    Args:
        words: The program, looked for in PATH, and its arguments.
        environ: Its environment.

    Raises:
        FileNotFoundError: There is no such program.
        OSError: It cannot be executed.
    """

    def __init__(self, words: Sequence[str], environ: Mapping[str, str]) -> None:
        self.exit_code: int | None = None
        self._pid = os.posix_spawnp(words[0], list(words), dict(environ), setsigmask=(), setsigdef=_RESTORED)

    def forward(self, info: signal.struct_siginfo) -> None:
        """Pass a signal on that was meant for the command too and has not reached it."""
        leads = os.getsid(0) == os.getpid()
        if info.si_signo in FORWARDED and not reached_everybody(info.si_code, info.si_signo, leads_session=leads):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, info.si_signo)  # not reaped yet, so the number is still its own

    def poll(self) -> int | None:
        """Return the exit code, or None while the command runs."""
        if self.exit_code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self.exit_code = code if code >= 0 else EXIT_SIGNAL - code
        return self.exit_code
