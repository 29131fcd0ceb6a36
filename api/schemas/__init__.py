"""What callers may send and what they get, as pydantic models: the edge, and nothing inside it."""
