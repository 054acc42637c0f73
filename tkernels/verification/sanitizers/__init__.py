"""What the interpreter can see that a GPU cannot show: each sanitizer is one file."""
