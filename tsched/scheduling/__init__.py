"""Which sequence advances by how many tokens, and where its memory lies. Needs neither torch nor a model."""
