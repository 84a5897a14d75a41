"""Training data: documents -> tokens -> windows -> batches, with one global cursor."""
