"""Mutation testing: faults put into kernels and launchers on purpose, to see whether the checks notice.

`tk check --mutate` is the command. A fault (`faults`, `launcher_faults`) is planted in a fork of a worker process
(`worker`), which runs the op's drawn cases until one of them shows it. What survives is a hole in the checks, or an
equivalent (`equivalent`).
"""
