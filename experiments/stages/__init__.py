"""What the tasks of a sweep do, by phase: check, kernels, engine, peers, quantization; and what their rows give."""
