"""Checkpoints that are Python pickles become safetensors: what `tk convert` does."""
