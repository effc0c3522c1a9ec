"""Several GPUs: attention over the tokens of all ranks, and guidance with a rank for each half of the batch."""
