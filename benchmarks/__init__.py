"""Experiments, each run as ``python -m benchmarks NAME``. They use the public API of tighter_gp only."""
