"""Ground floor: settings, database session, ids, clock, logging, metrics. Holds no domain words."""
