"""`make fuzz`: every target for a while, by atheris where it is installed, else by the mutator, which is said.

    python -m tests.fuzz.run [--seconds N] [--target NAME ...] [--seed N]

What breaks a reader is written to `build/fuzz/`; once it is mended it belongs into `tests/fuzz/corpus/<target>/`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import pathlib
import random
import resource
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOUND = ROOT / "build" / "fuzz"
ROOM_NBYTES = 1 << 30
MAX_SECONDS = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="for each target")
    parser.add_argument("--target", action="append", help="only this one; may be given several times")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--mutator", action="store_true", help="although atheris is there")
    parser.add_argument("--atheris", metavar="NAME", help=argparse.SUPPRESS)
    args = parser.parse_args()
    FOUND.mkdir(parents=True, exist_ok=True)
    if args.atheris:
        return _by_atheris(args.atheris, args.seconds, args.seed)
    from tests.fuzz.targets import TARGETS

    is_guided = not args.mutator and importlib.util.find_spec("atheris") is not None
    if not is_guided and not args.mutator:
        print("atheris is not installed for this Python: the mutator runs instead, which sees no coverage")
    print(f"seed {args.seed}; {args.seconds:g} s for each target, by {'atheris' if is_guided else 'the mutator'}")
    broken = []
    for name in args.target or TARGETS:
        if is_guided:
            command = [sys.executable, "-m", "tests.fuzz.run", "--atheris", name, "--seconds", str(args.seconds)]
            done = subprocess.run([*command, "--seed", str(args.seed)], capture_output=True, text=True, check=False)
            said = [line for line in done.stderr.splitlines() if line.startswith(("Done", "stat::number"))]
            print(f"{name:20} {'sound' if done.returncode == 0 else 'BROKEN'} {' '.join(said)}", flush=True)
            if done.returncode:
                print(done.stdout[-4000:], done.stderr[-4000:])
                broken.append(name)
        else:
            broken += _by_mutator(name, args.seconds, args.seed)
    print(f"broken: {', '.join(broken)}; see {FOUND}" if broken else "every target is sound")
    return 1 if broken else 0


def _by_mutator(name: str, seconds: float, seed: int) -> list[str]:
    from tests.fuzz.mutator import mutated
    from tests.fuzz.targets import TARGETS, corpus_of

    rng, seeds, count, slowest = random.Random(f"{seed} {name}"), corpus_of(name), 0, 0.0
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + ROOM_NBYTES, before[1]))
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            data = mutated(seeds, rng)
            started = time.process_time()
            try:
                TARGETS[name].read(data)
                taken = time.process_time() - started
                assert taken < MAX_SECONDS, f"{taken:.1f} s"
            except Exception as error:
                kept = FOUND / f"{name}-{hashlib.sha256(data).hexdigest()[:16]}"
                kept.write_bytes(data)
                print(f"{name:20} BROKEN after {count}: {type(error).__name__}: {str(error)[:300]} ({kept})")
                return [name]
            count, slowest = count + 1, max(slowest, taken)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    print(f"{name:20} sound: {count} documents, the slowest {slowest * 1000:.0f} ms", flush=True)
    return []


def _by_atheris(name: str, seconds: float, seed: int) -> int:
    import atheris

    with atheris.instrument_imports(include=["asyncckpt", "asyncckpt_worker"]):
        from tests.fuzz.targets import TARGETS, corpus_of

    with tempfile.TemporaryDirectory() as corpus:
        for n, data in enumerate(corpus_of(name)):
            pathlib.Path(corpus, str(n)).write_bytes(data)
        options = [f"-max_total_time={int(seconds)}", f"-seed={seed}", "-max_len=65536", f"-timeout={int(MAX_SECONDS)}"]
        options += ["-rss_limit_mb=3072", "-print_final_stats=1", f"-artifact_prefix={FOUND}/{name}-", corpus]
        atheris.Setup([sys.argv[0], *options], TARGETS[name].read)
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
