"""Dedicated ownership and the Muon optimizer for FSDP2 models. Importing it has no side effect."""
