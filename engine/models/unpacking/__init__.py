"""Reads packed weights of other tools' checkpoints as plain ones: a file for each format."""
