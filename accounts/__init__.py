"""Who are you, and what may you do? Users, organizations, sessions, API keys, audit."""
