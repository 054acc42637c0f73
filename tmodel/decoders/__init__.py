"""The parts that decoders are put together from: each says what tensors it has, and becomes a layer with weights."""
