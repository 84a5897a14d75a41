"""Weights to and from folders that transformers.LlamaForCausalLM reads: safetensors and config.json.

Nothing here holds a whole model: weights pass tensor by tensor, or by the rows that a rank keeps.
"""

from dmuon_titan.hugging_face.exporting import export
from dmuon_titan.hugging_face.weights import HuggingFaceWeights, read_size

__all__ = ["HuggingFaceWeights", "export", "read_size"]
