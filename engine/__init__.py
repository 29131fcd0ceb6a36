"""Tokens in, tokens out: the engine knows no user and no money."""
