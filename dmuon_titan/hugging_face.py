from pathlib import Path


class HuggingFaceWeights:
    def __init__(self, folder: Path, size): ...
