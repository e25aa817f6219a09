"""The pipeline axis: which layers a process holds, and how micro-batches go through them."""
