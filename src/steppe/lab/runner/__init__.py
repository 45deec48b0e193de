"""Many training runs: planned, and trained in this process, in several processes or on a cluster, each only once."""
