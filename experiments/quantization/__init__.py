"""What a quantized model costs and saves: made, judged on text, and told."""
