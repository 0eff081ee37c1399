"""Data formats, images and prompts, converted to inputs of the models."""
