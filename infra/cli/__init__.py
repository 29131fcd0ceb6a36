"""The `ncompass` command, one file per group of verbs."""
