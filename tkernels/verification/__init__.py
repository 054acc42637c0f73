"""Whether a kernel is right, and how it fails where it is not: checks, sanitizers, mutants, machine code."""
