"""The pretraining harness: TOML in, checkpoints and metrics out."""
