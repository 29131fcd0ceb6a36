"""Structured output: grammars are compiled where nothing can be hurt, and followed token by token."""
