"""Running steps on a GPU: what it must be able to do, its buffers, graphs, and the runner over them."""
