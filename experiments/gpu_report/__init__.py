"""Everything that needs a GPU, measured by one command, the most valuable first, within its time and resumable.

`worth` says what there is to do and in which order, `estimates` what that takes, `supervisor` which step is next and
until when, by what `journal` knows of those before; `forecast` asks it the same by an imagined clock. `processes` gives
steps a process, `worker` is what that process does. `precompile` and `weights` make beforehand what it needs, and
`mark_runs` runs an engine's mark as far as its time allows. `folder` keeps the rows of what was done, `home` packs them
for the way home, `figures` and `table` make the report of them.
"""
