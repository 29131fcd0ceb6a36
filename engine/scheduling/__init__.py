"""The scheduler: which tokens the next step computes, for whom, and who waits."""
