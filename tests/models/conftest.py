"""One compute thread, and sequences that take blocks from each other."""

from tests.engine.conftest import eager_admission, one_thread

__all__ = ["eager_admission", "one_thread"]
