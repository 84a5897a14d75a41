"""The table of sizes against what Meta published, and counts against counts by hand."""

import subprocess
import sys

import pytest

from models.llama.sizes import FLAVORS, LlamaSize


@pytest.mark.parametrize(
    ("name", "flavor", "num_parameters", "ffn_hidden_dim"),
    [
        ("llama3", "1B", 1_235_814_400, 8192),
        ("llama3", "3B", 3_212_749_824, 8192),
        ("llama3", "8B", 8_030_261_248, 14336),
        ("llama3", "70B", 70_553_706_496, 28672),
        ("llama3", "405B", 405_853_388_800, 53248),
        ("llama2", "7B", 6_738_415_616, 11008),
        ("llama2", "13B", 13_015_864_320, 13824),
        ("llama2", "70B", 68_976_648_192, 28672),
    ],
)
def test_published_sizes(name: str, flavor: str, num_parameters: int, ffn_hidden_dim: int) -> None:
    size = FLAVORS[name][flavor]
    assert size.num_parameters() == num_parameters
    assert size.ffn_hidden_dim == ffn_hidden_dim


def tiny(tie_embeddings: bool) -> LlamaSize:
    return LlamaSize(8, 2, 4, 2, 10, None, 4, 10000.0, tie_embeddings=tie_embeddings)


def test_counts_by_hand() -> None:
    """Wrong if a tied matrix counts twice, the look-up counts as a product, or a tied head doesn't."""
    block = 2 * 8 * 8 + 2 * 4 * 8 + 3 * 24 * 8 + 2 * 8
    matrices = 2 * block + 8 + 10 * 8
    assert tiny(False).num_parameters() == matrices + 10 * 8
    assert tiny(True).num_parameters() == matrices
    attention = 12 * 2 * 4 * 2 * 16
    assert tiny(False).flops_per_token(16) == tiny(True).flops_per_token(16) == 6 * matrices + attention


@pytest.mark.parametrize(
    ("sizes", "words"),
    [((10, 4, 2), "dim 10"), ((12, 4, 2), "even"), ((16, 4, 3), "num_kv_heads 3")],
)
def test_impossible_heads_are_refused(sizes: tuple[int, int, int], words: str) -> None:
    dim, num_heads, num_kv_heads = sizes
    with pytest.raises(ValueError, match=words):
        LlamaSize(dim, 2, num_heads, num_kv_heads, 10, None, 4, 10000.0)


def test_sizes_import_no_torch() -> None:
    """Wrong if a mistake in a configuration costs the seconds that importing torch takes."""
    command = "import sys, models.llama.sizes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0
