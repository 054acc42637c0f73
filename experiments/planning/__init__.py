"""From a document to what will run: axes laid out, every name and value checked, and nothing built."""
