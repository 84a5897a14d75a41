"""Reference models. Single-device code that depends on torch only."""
