"""Text to token ids and back: sentencepiece models, and how we train one that loses nothing."""

import io
import logging
from collections.abc import Iterable
from pathlib import Path

import sentencepiece

from dmuon_titan.errors import DataError

logger = logging.getLogger(__name__)

# sentencepiece writes a space as U+2581 and cannot tell that character from a space afterwards.
_SPACE_SYMBOL = "\u2581"

_LOSSY_PROBES = ("a\nb", "a\r\nb", "a  b", " a", "a ", "a\tb", "\ufb01", "e\u0301", "\U0001f600", "a\x00b")


class Tokenizer:
    """A sentencepiece model. Text never yields a control id: `</s>` in a document is four ordinary characters."""

    def __init__(self, path: Path) -> None:
        """Load a model file, and warn if it does not keep every character.

        Raises DataError if the file is missing or no sentencepiece model.
        """
        try:
            proto = Path(path).read_bytes()
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; a sentencepiece model is needed here") from None
        try:
            if not proto:
                raise RuntimeError("sentencepiece takes an empty file for a model")
            self._model = sentencepiece.SentencePieceProcessor(model_proto=proto)
        except RuntimeError:
            raise DataError(f"{path}: not a sentencepiece model ({len(proto)} bytes)") from None
        self.vocab_size: int = self._model.vocab_size()
        self.bos_id: int | None = _or_none(self._model.bos_id())
        self.eos_id: int | None = _or_none(self._model.eos_id())
        # Of U+2581 in UTF-8. A model without byte fallback has no ids for bytes, and loses the character.
        byte_ids = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_SYMBOL.encode()]
        self._space_symbol_ids = byte_ids if all(map(self._model.is_byte, byte_ids)) else None
        self.adds_prefix: bool = self._model.encode("a", out_type=str)[0].startswith(_SPACE_SYMBOL)
        lost = [probe for probe in _LOSSY_PROBES if self.decode(self.encode(probe)) != probe]
        if lost:
            logger.warning(
                "%s: this tokenizer does not keep all text: %s. A model trained without whitespace loss, with "
                "identity normalisation and byte fallback does",
                path,
                ", ".join(f"{probe!r} returns as {self.decode(self.encode(probe))!r}" for probe in lost[:3]),
            )

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without BOS or EOS."""
        return self.encode_batch([text], num_threads=1)[0]

    def encode_batch(self, texts: list[str], num_threads: int) -> list[list[int]]:
        """Ids of several texts, encoded in parallel."""
        if self._space_symbol_ids is None or not any(_SPACE_SYMBOL in text for text in texts):
            return self._model.encode(texts, num_threads=num_threads)
        return [self._encode_around_space_symbol(text, self._space_symbol_ids) for text in texts]

    def decode(self, ids: list[int]) -> str:
        """Text of some ids. Control ids yield nothing; bytes that are no UTF-8 yield U+FFFD."""
        return self._model.decode(ids)

    def _encode_around_space_symbol(self, text: str, symbol_ids: list[int]) -> list[int]:
        first, *rest = text.split(_SPACE_SYMBOL)
        ids = self._model.encode(first)
        for part in rest:
            ids += symbol_ids + self._model.encode(part)
        return ids


def train_tokenizer(sentences: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a BPE model of vocab_size pieces (256 bytes and 3 control pieces among them) that keeps all text.

    Holds all sentences in memory: pass a sample. The same sentences give the same file.
    Raises DataError if the text is too small or too varied for the vocabulary.
    """
    # A list, because sentencepiece takes an error inside an iterator for its end.
    sentences = list(sentences)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=1 << 20,
            num_threads=1,  # the number is stored in the file, which must not depend on the machine
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2].strip() or "there is no text"
        raise DataError(
            f"no tokenizer of {vocab_size} pieces can be trained on this text: {reason}. "
            "Choose another --vocab-size or give more text"
        ) from None
    path.write_bytes(model.getvalue())


def _or_none(token_id: int) -> int | None:
    return token_id if token_id >= 0 else None
