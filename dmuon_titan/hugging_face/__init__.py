"""Weights to and from folders that transformers.LlamaForCausalLM reads: safetensors and config.json.

Nothing here holds a whole model: weights pass tensor by tensor, or a rank's rows of it.
"""

from dmuon_titan.hugging_face.exporting import export
from dmuon_titan.hugging_face.importing import import_folder
from dmuon_titan.hugging_face.weights import HuggingFaceWeights, read_size

__all__ = ["HuggingFaceWeights", "export", "import_folder", "read_size"]
