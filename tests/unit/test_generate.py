"""Continuing a text: which token is drawn, what the model is given, when it ends."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dmuon_titan.data.tokenizer import Tokenizer, train_tokenizer
from dmuon_titan.tools.generate import generate
from models.llama.model import Llama
from models.llama.sizes import LlamaSize
from tests.unit.test_llama_model import build

SIZE = LlamaSize(32, 2, 2, 1, 320, None, 32, 10000.0)  # a larger vocabulary than the tokenizer's


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_tokenizer([f"def function_{n}(argument): return argument\n" for n in range(50)], 300, path)
    return Tokenizer(path)


@pytest.fixture(scope="module")
def model() -> Llama:
    return build(SIZE, max_seq_len=64)


def sample(model: Llama, tokenizer: Tokenizer, num_tokens: int = 12, **options: object) -> str:
    arguments = {"seed": 0, "max_context": 64, "device": "cpu", **options}
    return generate(model, tokenizer, "def ", num_tokens, **arguments)  # type: ignore[arg-type]


def test_greedy_text_is_the_likeliest_token_each_time(model: Llama, tokenizer: Tokenizer) -> None:
    """Wrong if padding is seen, or the logits of another position are read."""
    tokens = tokenizer.encode("def ")
    for _ in range(12):
        logits_V = model(torch.tensor([tokens]))[0, -1, : tokenizer.vocab_size]
        token = int(logits_V.argmax())
        if token in (tokenizer.bos_id, tokenizer.eos_id):
            break
        tokens.append(token)
    assert len(tokens) > 8
    assert sample(model, tokenizer, temperature=0.0) == tokenizer.decode(tokens)


def test_seed_decides(model: Llama, tokenizer: Tokenizer) -> None:
    state = torch.get_rng_state()
    assert sample(model, tokenizer) == sample(model, tokenizer)
    assert sample(model, tokenizer) != sample(model, tokenizer, seed=1)
    assert sample(model, tokenizer, top_k=1) == sample(model, tokenizer, temperature=0.0)
    assert torch.equal(torch.get_rng_state(), state)


def test_context_has_one_shape_and_forgets_the_oldest(model: Llama, tokenizer: Tokenizer) -> None:
    seen: list[Tensor] = []

    def forward(tokens_1C: Tensor) -> Tensor:
        seen.append(tokens_1C.clone())
        return model(tokens_1C)

    generate(forward, tokenizer, "def ", 12, seed=0, max_context=8, device="cpu", temperature=0.0)
    assert {tuple(context.shape) for context in seen} == {(1, 8)}
    assert len(seen) > 8
    assert torch.equal(seen[-1][0, :-1], seen[-2][0, 1:])
    assert seen[-1][0, -1] == model(seen[-2])[0, -1, : tokenizer.vocab_size].argmax()


def test_the_end_of_a_document_ends_the_text(tokenizer: Tokenizer) -> None:
    def forward(tokens_1C: Tensor) -> Tensor:
        logits = torch.zeros(1, tokens_1C.shape[1], 320)
        logits[..., tokenizer.eos_id] = 100.0
        return logits

    assert generate(forward, tokenizer, "def ", 5, seed=0, max_context=64, device="cpu") == "def "


def test_an_empty_prompt_begins_a_document(model: Llama, tokenizer: Tokenizer) -> None:
    assert generate(model, tokenizer, "", 8, seed=0, max_context=64, device="cpu")


def test_impossible_options_are_refused(model: Llama, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="temperature -1"):
        sample(model, tokenizer, temperature=-1.0)
