"""A sweep as tasks, each in a process of its own: here or on a Ray cluster, one at a time where speeds are compared."""
