"""What a user asks for and gets back: parameters, prompts, outputs, text, stopping."""
