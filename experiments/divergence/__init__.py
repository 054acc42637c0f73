"""Where two sets of kernels, or this engine and transformers, part: `tk diverge`."""
