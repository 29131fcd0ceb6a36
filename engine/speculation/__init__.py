"""Speculative decoding by prompt lookup: what a text says again is guessed, and checked exactly."""
