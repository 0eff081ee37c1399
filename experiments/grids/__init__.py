"""Questions about grids of noisy symbols, and a small reader that answers them."""
