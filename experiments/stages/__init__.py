"""The stages of a run, in order: check, kernels, engine (with peers beside it), parity."""
