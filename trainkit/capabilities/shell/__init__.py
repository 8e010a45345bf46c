"""Shells on a cluster: `trainkit shell` in a new allocation, `trainkit attach` next to a running job."""
