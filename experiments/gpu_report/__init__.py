"""Everything that needs a GPU, measured by one command, the most valuable first, within its time and resumable.

`steps` says what there is to do and in which order, `journal` keeps what was found, `supervisor` runs the steps in
processes that may die, `worker` is such a process, `figures` and `table` turn the journal into the report.
"""
