"""The commands of `tk`, one file each: `run(...)` does the work and returns the exit status."""
