"""Benchmarks: each prints a table for people and writes `var/bench/<name>.json`."""
