"""What Triton's interpreter needs to be truthful, and to be watched."""
