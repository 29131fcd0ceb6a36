"""The worker's process: two threads, a keeper, and the models that it hosts."""
