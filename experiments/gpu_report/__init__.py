"""Everything that needs a GPU, measured by one command, the most valuable first, within its time and resumable.

`steps` says what there is to do and in which order, `folder` keeps the rows of what was done, `supervisor` gives each
step a process of its own, `worker` is what that process does, `figures` and `table` make the report of the rows.
"""
