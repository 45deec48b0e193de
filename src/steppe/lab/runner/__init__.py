"""Many training runs: planned, trained in this process, in several or on a cluster, each once."""
