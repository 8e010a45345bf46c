"""Opens shells on a cluster: `trainkit shell` in a new allocation, `trainkit attach` in a running job."""
