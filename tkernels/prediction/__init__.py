"""How long a kernel takes on a GPU that is not there: modelled from its code, never measured.

`gpus` has the data sheets, `skeleton` what of a kernel's code decides how often its loops run, `walk` runs that at a
launch's sizes, `kept` is the table of compiled kernels' facts, `calls` says what a variant launches at a point, and
`model` makes a time of it.
"""
