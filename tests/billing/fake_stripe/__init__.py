"""A Stripe of our own: stateful, over real HTTP, and as hostile as the real one may be."""
