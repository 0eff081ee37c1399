"""Reading and writing of checkpoints: model folders and policy files."""
