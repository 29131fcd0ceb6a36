"""Benchmarks of the engine without HTTP; each prints a fraction of the machine's limit."""
