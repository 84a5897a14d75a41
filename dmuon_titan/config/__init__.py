"""Configuration: one schema, loading with the source of every value, validation. Imports no torch."""
