"""What compiled kernels are made of, read from their machine code: no GPU, no driver.

`compile` compiles what a launcher would launch at the points of `points`; `sass` and `amdgcn` read the binaries,
`accesses` finds the main loop and its access widths, `occupancy` counts what fits on a multiprocessor; `gates` says
which rows fail, `expected` keeps a table for each Triton version.
"""
