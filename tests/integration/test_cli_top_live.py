"""`asyncckpt top` on a terminal: drawn in place by `rich`, one table below the other without it."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncckpt.cli import main
from asyncckpt.cli.commands import top

DEADLINE_S = 60.0
WITHOUT_RICH = "import sys; sys.modules['rich'] = None; from asyncckpt.cli import main; sys.exit(main(sys.argv[1:]))"
WITH_RICH = "import sys; from asyncckpt.cli import main; sys.exit(main(sys.argv[1:]))"


def drawn_until(master: int, holds: Callable[[str], bool]) -> str:
    """Return what was written to a terminal, once it `holds`."""
    written, deadline = "", time.monotonic() + DEADLINE_S
    while not holds(written):
        assert select.select([master], [], [], deadline - time.monotonic())[0], written
        written += os.read(master, 65536).decode()
    return written


@pytest.mark.parametrize(
    ("program", "terminal"),
    [(WITH_RICH, "xterm"), (WITH_RICH, "dumb"), (WITHOUT_RICH, "xterm")],
    ids=["rich", "dumb terminal", "no rich"],
)
def test_a_terminal_is_left_as_it_was_and_ctrl_c_ends_it(program: str, terminal: str, tmp_path: Path) -> None:
    if program == WITH_RICH:
        pytest.importorskip("rich")
    (tmp_path / "private").mkdir(mode=0o700)
    endpoint = f"ipc://{tmp_path}/private/w.sock"
    master, slave = pty.openpty()
    arguments = ["top", "--interval", "0.1", "--endpoint", endpoint]
    environ = {**os.environ, "TERM": terminal, "COLUMNS": "60", "LINES": "20"}
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdin=slave, stdout=slave, stderr=slave, env=environ
    )
    try:
        os.close(slave)
        written = drawn_until(master, lambda text: "waiting for one" in text or "no worker at" in text)
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0
        while select.select([master], [], [], 0)[0]:
            try:
                written += os.read(master, 65536).decode()
            except OSError:  # the other end is closed, and all of it was read
                break
    finally:
        process.kill()
        process.wait()
        os.close(master)
    assert "Traceback" not in written
    is_live = program == WITH_RICH and terminal != "dumb"
    assert ("\x1b" in written) == is_live
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h"), "the cursor is seen again"
    plain = re.sub("\x1b\\[[?0-9;]*[A-Za-z]", "", written)
    assert "no worker at" in plain and (not is_live or max(map(len, plain.splitlines())) <= 60)


UNDER_WAY = """
import argparse, os, random, signal, threading, time
from asyncckpt.cli.commands import top

def interrupt(after_s):
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGINT)

top.status_of, top.MIN_INTERVAL_S = lambda *_: {"pid": 1}, 0.0
top._plain = lambda *_, **__: None
arguments = argparse.Namespace(endpoint="ipc:///private/w.sock", once=False, json=True, interval=0.0)
rng = random.Random(0)
for _ in range(500):
    interrupts = threading.Thread(target=interrupt, args=(rng.uniform(0, 0.001),))
    try:
        interrupts.start()
        top.run(arguments)
    except KeyboardInterrupt:  # before the command had begun
        pass
    interrupts.join()
"""


def test_ctrl_c_ends_it_at_whatever_moment_it_comes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNDER_WAY], check=False, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_in_the_middle_of_a_destructor_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    n_asked = 0

    def ask(_endpoint: str) -> None:
        nonlocal n_asked
        n_asked += 1
        assert n_asked == 1, "the interrupt was lost"
        Interrupted()

    monkeypatch.setattr(top, "_asked", ask)
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["top", "--interval", "0.1", "--endpoint", "ipc:///nowhere/w.sock"]) == 0
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, inherited)
