"""`python -m benchmarks`: run one question, all of the suite, or each once at its smallest.

python -m benchmarks                       the suite
python -m benchmarks QUESTION [OPTIONS]    one question; --help lists its options
python -m benchmarks --smoke [QUESTION ...]
python -m benchmarks --targets             every target and what was measured
"""

from __future__ import annotations

import sys

from benchmarks import runner, targets


def main(arguments: list[str]) -> int:
    """Do what the command asks for; return the exit code."""
    if not arguments:
        suite = [(name, state) for name in runner.names() for state in runner.question(name).suite]
        return max(runner.main(name, ["--state", state] if state else []) for name, state in suite)
    first, *rest = arguments
    if first == "--smoke":
        return runner.smoke(rest)
    if first == "--targets":
        print("\n".join(map(runner.target_line, targets.rows())))
        return 0
    if first not in runner.names():
        print(__doc__)
        for name in runner.names():
            print(f"  {name:12s} {runner.asks(name).splitlines()[0]}")
        return 0 if first in ("-h", "--help") else 2
    return runner.main(first, rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
