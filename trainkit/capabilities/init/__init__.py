"""`trainkit init`: the profile of a cluster, a first run config for it, and a task to start from."""
