"""The processes that a warm interpreter forks are what `python -c` gives."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.warm_python import DEADLINE_S, WarmPython

pytest.importorskip("torch")

PROGRAM = """
import atexit, json, os, signal, sys, threading, time
def at_exit():
    print("at exit", threading.active_count())
atexit.register(at_exit)
told = threading.Event()
threading.Thread(target=lambda: (told.wait(), time.sleep(0.2), print("thread"))).start()
signals = {one.name: str(signal.getsignal(one)).split(" at ")[0] for one in signal.Signals}
found = {
    "argv": sys.argv, "cwd": os.getcwd(), "path": sys.path, "environment": sorted(os.environ), "name": __name__,
    "signals": signals, "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "fds": sorted(fd for fd in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{fd}")),
    "encoding": sys.stdout.encoding, "buffered": sys.stdout.line_buffering, "stdin": sys.stdin.read(),
    "threads": len(os.listdir("/proc/self/task")), "flags": str(sys.flags), "warnings": str(sys.warnoptions),
}
print(json.dumps(found, sort_keys=True), flush=True)  # before it may be killed
told.set()
print("to stderr", file=sys.stderr)
if sys.argv[1] == "raise":
    raise ValueError("on purpose")
if sys.argv[1] == "interrupt":
    signal.raise_signal(signal.SIGINT)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("how", ["0", "3", "raise", "interrupt", "kill"])
def test_a_program_finds_and_leaves_what_an_interpreter_gives(
    how: str, warm_python: WarmPython, tmp_path: pathlib.Path
) -> None:
    environ = {**os.environ, "SOMETHING": "else"}
    warm = warm_python.run(PROGRAM, how, "é", env=environ, cwd=tmp_path)
    cold = subprocess.run(
        [sys.executable, "-c", PROGRAM, how, "é"],
        env=environ,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # ignored where nohup has started the tests
    )
    found, expected = (json.loads(done.stdout.partition("\n")[0]) for done in (warm, cold))
    assert {key: (value, expected[key]) for key, value in found.items() if value != expected[key]} == {}
    assert (warm.returncode, warm.stdout) == (cold.returncode, cold.stdout)
    ends = [(text.splitlines()[:1], text.splitlines()[-1:]) for text in (warm.stderr, cold.stderr)]
    assert ends[0] == ends[1], "but for the frames above the program's"


def test_a_program_hears_signals_and_reads_what_it_is_told(warm_python: WarmPython) -> None:
    program = """
        import sys
        sys.stdout.write(sys.stdin.readline())
        sys.stdout.flush()
        sys.stdin.readline()
    """
    (read, write), (heard, said) = os.pipe(), os.pipe()
    with warm_python.running(textwrap.dedent(program), stdin=read, stdout=said) as process:
        os.write(write, b"hello\n")
        assert os.read(heard, 100) == b"hello\n"
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == -signal.SIGTERM == process.returncode == process.poll()
        process.kill()  # of one that has ended
    for fd in (read, write, heard, said):
        os.close(fd)


def test_a_program_that_takes_too_long_is_ended(warm_python: WarmPython) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        warm_python.run("import time; time.sleep(600)", timeout_s=0.2)


def test_all_programs_end_with_whoever_starts_them(tmp_path: pathlib.Path) -> None:
    warm = WarmPython()
    process = warm.start("import time; time.sleep(600)")
    warm.close()
    with pytest.raises(ValueError, match="invalid literal"):  # nobody tells how it ended
        process.wait(DEADLINE_S)
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    os.close(process._pidfd)
    process._ended.close()
