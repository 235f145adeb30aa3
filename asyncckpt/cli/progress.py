"""Progress of a long command on a terminal: a bar with `rich` (extra `cli`), without it a line every few seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from asyncckpt.basics.quantities import human
from asyncckpt.cli.output import can_redraw
from asyncckpt.errors import AsyncCkptError
from asyncckpt.storage.catalog import read_manifest
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import store_over
from asyncckpt.storage.store import StoreFiles

Show = Callable[[int, int], None]
"""Called with (done, total) bytes, by several threads. A total of 0 means unknown."""

_REDRAW_S = 0.1
_NEXT_LINE_S = 5.0


@contextlib.contextmanager
def progress(*, quiet: bool) -> Iterator[Show | None]:
    """Yield a function that shows progress on stderr; None if that is not a terminal, or if `quiet`."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    if not can_redraw(sys.stderr):
        yield _throttled(_NEXT_LINE_S, _print_line)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[pace]}", markup=False))
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
    ) as bar:
        task = bar.add_task("", total=None, pace="")

        def draw(done: int, total: int, pace: str) -> None:
            bar.update(task, completed=done, total=total or None, pace=pace, refresh=True)

        yield _throttled(_REDRAW_S, draw)


def _throttled(every_s: float, draw: Callable[[int, int, str], None]) -> Show:
    """Return a function that calls `draw` at most every `every_s` seconds, and when all is done."""
    began = drawn = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal drawn
        now = time.monotonic()
        if now - drawn >= every_s or done >= total > 0:
            drawn = now
            draw(done, total, f"{human(done)}, {human(done / max(now - began, 1e-6))}/s")

    return show


def _print_line(done: int, total: int, pace: str) -> None:
    print(f"{min(1.0, done / total):.0%}, {pace}" if total else pace, file=sys.stderr, flush=True)


def _counted(files: Files, show: Show, total: int) -> Files:
    """Let `files` show how much was read, by several threads; return it."""
    lock, read, done = threading.Lock(), files.preadv, 0

    def preadv(fd: int, buffers: Sequence[memoryview | bytearray], offset: int, flags: int = 0) -> int:
        nonlocal done
        count = read(fd, buffers, offset, flags)
        with lock:
            done += count
            show(done, total)
        return count

    files.preadv = preadv  # type: ignore[method-assign]
    return files


@contextlib.contextmanager
def show_reads(files: Files, total: Callable[[], int], *, quiet: bool) -> Iterator[Files]:
    """Yield a `Files` that shows the progress of reads on stderr; `files` itself if that is not a terminal.

    Args:
        files: The files to read through.
        total: Returns the number of bytes that will be read; 0: unknown. Called only if progress is shown.
        quiet: Show nothing.
    """
    with progress(quiet=quiet) as show:
        if show is None:
            yield files
        else:
            yield _counted(StoreFiles(files.store) if isinstance(files, StoreFiles) else Files(), show, total())


def recorded_nbytes(path: str, files: Files) -> int:
    """Return the size of a checkpoint according to its manifest, in bytes; 0: not known."""
    try:
        return read_manifest(path, store_over(files)).nbytes
    except (AsyncCkptError, OSError):
        return 0
