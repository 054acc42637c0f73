"""Numbers in few bits: quantized weights, how they are made, packed and cut, and codes of a row."""
