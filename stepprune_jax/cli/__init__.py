"""Commands of the console scripts."""
