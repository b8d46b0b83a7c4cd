"""Measurements and long trials: python -m benchmarks NAME."""
