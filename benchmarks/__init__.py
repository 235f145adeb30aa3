"""Benchmarks: `python -m benchmarks QUESTION`. Not part of the tests.

`runner` makes rounds and keeps result files in `results/`; `questions/` has one file for each question. Several
questions use `limits`, `workloads`, `contenders` and `training_cost`. `targets` and `report` make the tables of the
documentation from result files.
"""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
RESULTS = CHECKOUT / "benchmarks" / "results"
