"""The whole platform on one machine: set-up, the supervisor, and what it starts."""
