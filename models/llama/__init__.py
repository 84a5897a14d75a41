"""The reference Llama model."""
