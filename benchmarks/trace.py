"""Where the time of one save goes: what every thread of trainer and worker did, measured and drawn.

    python -m benchmarks.trace [--state gpt] [--staging overlap] [--dir D]    measure, keep the result file, and draw it
    python -m benchmarks.trace --draw [--state gpt]                           draw the result file again

A loop trains and saves a few times; the last save but one is kept, a warm one. Writes trace-STATE.json below
benchmarks/results and trace-STATE.svg below docs/images. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import asyncckpt
from asyncckpt.staging import moving
from asyncckpt.staging.slot_stager import SlotStager
from benchmarks import machine, quiet, sources, states, training
from benchmarks.svg import Picture
from benchmarks.traced_worker import Event, Events

RESULTS = Path(__file__).parent / "results"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
SAVES, SHOWN = 4, 2
START_S = 30.0
JOIN_S = 0.0004
"""Two of a kind in one thread with less between them are one: a block is hashed in 20 microseconds."""

KINDS = {
    "train": ("b", "training"),
    "stage": ("f", "save(): plan, slot"),
    "copy": ("a", "copy"),
    "hash": ("e", "checksum"),
    "write": ("d", "write"),
    "fsync": ("c", "fsync"),
    "index": ("f", "index"),
    "prepare": ("f", "directory"),
    "commit": ("c", "commit"),
}
"""What is done -> colour and name."""

LEGEND = (
    *(KINDS[kind] for kind in ("train", "copy", "hash", "write")),
    ("c", "fsync, commit"),
    ("f", "plan, directory, index"),
)
NAMES, SCALE, ROW, TOP = 190, 760, 26, 46


def main() -> None:
    """Measure or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", choices=("gpt", "small", "tiny"), default="gpt")
    parser.add_argument("--staging", choices=("auto", "overlap", "blocking"), default="overlap")
    parser.add_argument("--draw", action="store_true", help="only draw the result file")
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--images", type=Path, default=IMAGES)
    args = parser.parse_args()
    target = args.results / f"trace-{args.state}.json"
    if not args.draw:
        directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
        try:
            result = {"benchmark": "trace", "state": args.state, "machine": machine.describe(directory)}
            result |= {"code": sources.code_of("trace"), **quiet.until_idle(), "staging": args.staging}
            result |= measure(args.state, args.staging, directory)
        finally:
            shutil.rmtree(directory)
        target.write_text(json.dumps(result, indent=1) + "\n")
    args.images.mkdir(parents=True, exist_ok=True)
    (args.images / f"trace-{args.state}.svg").write_text(draw(json.loads(target.read_text())))


def measure(state: str, staging: str, directory: Path) -> dict[str, Any]:
    """Return the events of one save, in seconds since `save()` was called."""
    os.environ["ASYNCCKPT_JOB"] = f"bench-{secrets.token_hex(4)}"
    endpoint, kept = f"ipc://{directory}/w.sock", directory / "events.json"
    directory.chmod(0o700)
    command = [sys.executable, "-m", "benchmarks.traced_worker", str(kept), "--endpoint", endpoint]
    with (directory / "worker.log").open("wb") as log:
        worker = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        _await_socket(directory / "w.sock", worker)
        events, marks, report, nbytes = _train(state, staging, endpoint, directory)
    finally:
        worker.terminate()
        worker.wait(START_S)
    began, ended = marks[SHOWN]
    found = [*events.found, *(("worker " + thread, *rest) for thread, *rest in json.loads(kept.read_text()))]
    inside = [(lane, kind, a - began, b - began) for lane, kind, a, b in found if b > began and a < ended]
    return {"nbytes": nbytes, "until_s": ended - began, "phases_s": report, "events": joined(inside)}


def _await_socket(path: Path, worker: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while not path.exists():
        if worker.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the worker has not started: {(path.parent / 'worker.log').read_text()[-500:]}")
        time.sleep(0.01)


def _train(
    state: str, staging: str, endpoint: str, directory: Path
) -> tuple[Events, list[tuple[float, float]], dict[str, float], int]:
    """Train and save; returns events, from when to when each save went, its phases, and the state's size."""
    events, marks, reports = Events(), [], []
    moving.careful_move = events.timed("copy", moving.careful_move)
    moving.ctypes.memmove = events.timed("copy", moving.ctypes.memmove)  # type: ignore[attr-defined]
    SlotStager.stage = events.timed("stage", SlotStager.stage)  # type: ignore[method-assign]
    loop = training.make(state)
    with asyncckpt.AsyncCheckpointer(endpoint=endpoint, staging=staging) as checkpointer:
        loop.attach(checkpointer.attach)
        loop.step()
        checkpointer.prepare(loop.state())
        step = events.timed("train", loop.step)
        for number in range(SAVES):
            saved = loop.state()
            began = time.monotonic()
            handle = checkpointer.save(saved, directory / str(number))
            done = threading.Event()
            handle.written.add_done_callback(lambda _, done=done: done.set())
            ended = began
            while not done.is_set():
                step()
            ended = began + handle.written.result().seconds["total"]
            marks.append((began, ended))
            reports.append(handle.written.result().seconds)
            shutil.rmtree(directory / str(number))
        nbytes = states.nbytes(loop.state())
    return events, marks, reports[SHOWN], nbytes


def joined(events: list[Event]) -> list[Event]:
    """Return the events in order, those of one kind and thread that follow at once as one."""
    found: list[Event] = []
    last: dict[str, int] = {}
    for lane, kind, began, ended in sorted(events, key=lambda e: e[2]):
        before = found[last[lane]] if lane in last else None
        if before is not None and before[1] == kind and began - before[3] < JOIN_S:
            found[last[lane]] = (lane, kind, before[2], max(before[3], ended))
        else:
            last[lane] = len(found)
            found.append((lane, kind, round(began, 6), round(ended, 6)))
    return [(lane, kind, round(a, 6), round(b, 6)) for lane, kind, a, b in found]


def draw(result: dict[str, Any]) -> str:
    """Return the picture: a row for every thread, time to the right."""
    events = [(lane, kind, a, min(b, result["until_s"])) for lane, kind, a, b in result["events"]]
    rows = _rows(events)
    height = TOP + ROW * len(rows) + 64
    picture = Picture(NAMES + SCALE + 60, height, f"One save of {result['nbytes'] / 1e9:.2f} GB, thread by thread")
    until_ms = 1e3 * result["until_s"]
    scale = SCALE / until_ms
    picture.legend(NAMES, 18, LEGEND, 120)
    bottom = TOP + ROW * len(rows)
    unit = next(u for u in (1, 5, 10, 50, 100, 200, 500, 1000, 5000, 60000) if until_ms / u <= 12)
    for at in range(0, int(until_ms) + 1, unit):
        picture.line(NAMES + at * scale, TOP - 8, NAMES + at * scale, bottom, "grid")
        picture.text(NAMES + at * scale, bottom + 14, f"{at} ms", kind="note", anchor="middle")
    for number, (name, lanes) in enumerate(rows):
        picture.text(NAMES - 10, TOP + ROW * number + 15, name, anchor="end")
        for lane, kind, a, b in sorted(events, key=lambda e: e[1] != "train"):
            if lane in lanes:
                x, width = NAMES + 1e3 * max(0.0, a) * scale, 1e3 * (b - max(0.0, a)) * scale
                hint = f"{KINDS[kind][1]}: {1e3 * a:.1f} to {1e3 * b:.1f} ms"
                picture.box(x, TOP + ROW * number, width, ROW - 6, KINDS[kind][0], hint)
    found = result["machine"]
    text = f"{result['nbytes'] / 1e9:.2f} GB, staging={result['staging']!r}, {found['cores']} cores, "
    text += f"{found['file_system']}, {found['date'][:10]}; the whole width is from save() to the commit."
    picture.text(10, height - 12, text, kind="note")
    return picture.rendered()


def _rows(events: list[Event]) -> list[tuple[str, set[str]]]:
    """Return the picture's rows: a name, and the threads whose events it shows; the trainer's first."""
    first: dict[str, float] = {}
    for lane, _, began, _ in events:
        first[lane] = min(began, first.get(lane, began))
    rows = [("training thread", {"MainThread"})]
    copiers = sorted((lane for lane in first if not lane.startswith("worker ") and lane != "MainThread"), key=first.get)  # type: ignore[arg-type]
    rows += [(f"copier {n + 1}", {lane}) for n, lane in enumerate(copiers)]
    others = sorted((lane for lane in first if lane.startswith("worker ")), key=first.get)  # type: ignore[arg-type]
    writers = [lane for lane in others if "-write-" in lane or "-io" in lane]
    rows += [("worker: directory, commit", set(others) - set(writers))]
    return rows + [(f"worker: writer {n + 1}", {lane}) for n, lane in enumerate(writers)]


if __name__ == "__main__":
    main()
