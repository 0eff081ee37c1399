"""Images and prompts, turned into what the models take."""
