"""Recorded runs: reading their folders, comparing them, and repeating them."""
