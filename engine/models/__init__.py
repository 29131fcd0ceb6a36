"""Models that the engine runs, behind one interface."""
