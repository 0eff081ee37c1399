"""Questions about the method itself: seeds, ablations, the paper's tables, worked examples."""
