"""LLaVA-v1.5: a CLIP tower, a two-layer projector and a Llama."""
