"""Measurements, each bounded in time, each kept as a JSON file in `benchmarks/results/`. Not part of the tests."""
