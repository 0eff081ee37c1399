"""What lets other programs drive the package; each needs that program to be installed."""
