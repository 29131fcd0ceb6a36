"""Every GPU test and benchmark in one go, in under ten minutes, with one report."""
