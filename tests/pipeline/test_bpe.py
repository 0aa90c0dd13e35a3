"""Loading, encoding with and training the byte-level BPE."""

import json
from pathlib import Path

import numpy as np
import pytest
from making import END_OF_TEXT, SHARED, byte_symbols, write_bytes_tokenizer

from pipeline.bpe import (
    BPE,
    TokenizerError,
    load,
    require_memory,
    token_bytes,
    train,
    training_memory,
)
from pipeline.encoders import choose_encoder

AWKWARD = (
    "e\u0301",
    "\ufb01 \uff26",
    "a\u00a0b",
    "  two lead",
    "tail  ",
    "x\r\ny",
    "\n\n\n",
    "a , b . c",
    "\u200bzero",
    "\x00nul",
)
UNSEEN = (
    "Привет, мир",
    "漢字",
    "\U0001f600",
    "".join(map(chr, range(1, 0x250))),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> BPE:
    """Trained on nothing but ASCII."""
    path = tmp_path_factory.mktemp("trained") / "tokenizer.json"
    path.write_bytes(train((f"only ascii words {n}" for n in range(200)), 400))
    return load(path)


def encode(bpe: BPE, *texts: str) -> list[list[int]]:
    """Ids of each text, by way of the encoder."""
    ids, lengths = choose_encoder(bpe, "tokenizers").encode_batch(texts)
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


def decode(bpe: BPE, ids: list[int]) -> str:
    return bpe.tokenizer.decode(ids, skip_special_tokens=False)


# ------------------------------------------------------------------ loading


def test_a_text_costs_its_bytes_where_nothing_is_merged(tmp_path: Path) -> None:
    """The counts of all other tests stand on this."""
    bpe = load(write_bytes_tokenizer(tmp_path / "tokenizer.json"))
    assert encode(bpe, "az", "", "é\n") == [[97, 122], [], [0xC3, 0xA9, 10]]
    assert (bpe.vocab_size, bpe.end_of_text_id) == (257, 256)
    assert (encode(bpe, ""), bpe.lossy) == ([[]], "")


def test_the_vocabulary_ends_after_its_largest_id(tmp_path: Path) -> None:
    """The number of entries is smaller where ids have holes, and bins would be refused or wrap."""
    tokens = byte_symbols()
    vocab = {token: index for index, token in enumerate(tokens)} | {END_OF_TEXT: 70_000}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    special = [{"id": 70_000, "content": END_OF_TEXT, "special": True}]
    special[0] |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    path = write_bytes_tokenizer(tmp_path / "t.json", model=model, added_tokens=special)
    assert load(path).vocab_size == 70_001


def test_end_of_text_in_a_document_is_ordinary_text(tmp_path: Path) -> None:
    """Texts about language models contain it, and it would cut them in two."""
    path = write_bytes_tokenizer(tmp_path / "tokenizer.json")
    for marked in (True, False):
        content = json.loads(path.read_text(encoding="utf-8"))
        content["added_tokens"][0]["special"] = marked
        path.write_text(json.dumps(content), encoding="utf-8")
        (ids,) = encode(load(path), f"see {END_OF_TEXT} here")
        assert bytes(ids).decode() == f"see {END_OF_TEXT} here"


def test_what_the_file_says_of_padding_templates_and_dropout_is_switched_off(
    tmp_path: Path,
) -> None:
    """A tokenizer.json from a chat model cuts texts at 512 tokens and begins each with <s>."""
    path = write_bytes_tokenizer(
        tmp_path / "tokenizer.json",
        truncation={
            "max_length": 2,
            "stride": 0,
            "strategy": "LongestFirst",
            "direction": "Right",
        },
        padding={
            "strategy": {"Fixed": 8},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "!",
        },
        post_processor={
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {END_OF_TEXT: {"id": END_OF_TEXT, "ids": [256], "tokens": ["x"]}},
        },
    )
    content = json.loads(path.read_text(encoding="utf-8"))
    content["model"] |= {"dropout": 0.9, "merges": [["a", "b"]]}
    content["model"]["vocab"]["ab"] = 257
    path.write_text(json.dumps(content), encoding="utf-8")
    assert encode(load(path), *["abcab"] * 8) == [[257, 99, 257]] * 8


def test_end_of_text_is_chosen_or_asked_for(tmp_path: Path) -> None:
    """Documents without one run into each other, and nobody notices."""
    content = write_bytes_tokenizer(tmp_path / "t.json").read_text(encoding="utf-8")
    path = tmp_path / "other.json"
    path.write_text(content.replace(END_OF_TEXT, "</s>"), encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"no token <\|endoftext\|> .* tokens are </s>"):
        load(path)
    with pytest.raises(TokenizerError, match="no token <eos>"):
        load(path, "<eos>")
    assert load(path, "</s>").end_of_text_id == 256


def test_a_vocabulary_that_lacks_bytes_is_refused(tmp_path: Path) -> None:
    """Such a tokenizer drops the bytes it does not know without an error."""
    path = write_bytes_tokenizer(tmp_path / "tokenizer.json")
    content = json.loads(path.read_text(encoding="utf-8"))
    del content["model"]["vocab"]["Ð"]  # 0xD0, which Cyrillic begins with
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"1 of its symbols .* 'Ð'"):
        load(path)


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"text": 1}', b"\xff"])
def test_what_is_no_tokenizer_is_named(tmp_path: Path, content: bytes | None) -> None:
    """The library's own message does not even tell the file."""
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: ") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_a_normalizer_is_noted(tmp_path: Path) -> None:
    """GPT-NeoX's composes accents: its bins cannot be decoded to the very texts."""
    path = write_bytes_tokenizer(tmp_path / "tokenizer.json", normalizer={"type": "NFC"})
    bpe = load(path)
    assert bpe.lossy == r"'e\u0301' comes back as '\xe9' (normalizer NFC)"
    assert choose_encoder(bpe, "tokenizers").name.endswith(bpe.lossy)


def test_the_bytes_of_each_id_add_up_to_the_text(trained: BPE) -> None:
    """Loss per byte is computed from them."""
    num_bytes = token_bytes(trained)
    for text in (*AWKWARD, *UNSEEN, "only ascii words"):
        (ids,) = encode(trained, text)
        assert num_bytes[ids].sum() == len(text.encode())


@pytest.mark.accept
def test_real_tokenizers_give_their_known_ids() -> None:
    """Everything that is switched off must leave ordinary text alone."""
    known_ids = (SHARED / "tokenizers" / "known_ids.json").read_text(encoding="utf-8")
    loaded: dict[str, BPE] = {}
    for known in json.loads(known_ids):
        name = known["tokenizer"]
        bpe = loaded[name] = loaded.get(name) or load(SHARED / "tokenizers" / f"{name}.json")
        if known["text"] == END_OF_TEXT:
            assert [bpe.end_of_text_id] == known["ids"]
        else:
            assert encode(bpe, known["text"]) == [known["ids"]]


# ------------------------------------------------------------------ training


def test_decoding_gives_back_what_was_encoded(tmp_path: Path, trained: BPE) -> None:
    """Bytes never seen in training, normal forms, blanks and controls: all of it is text."""
    untrained = load(write_bytes_tokenizer(tmp_path / "tokenizer.json"))
    for bpe in (trained, untrained):
        texts = (*AWKWARD, *UNSEEN)
        for text, ids in zip(texts, encode(bpe, *texts), strict=True):
            assert ids
            assert decode(bpe, ids) == text
    assert set(byte_symbols()) <= trained.tokenizer.get_vocab().keys()


@pytest.mark.parametrize("pattern", ["gpt2", "llama3"])
def test_both_patterns_keep_the_text(tmp_path: Path, pattern: str) -> None:
    """A pattern that drops what it does not match would drop text."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(train(["1234567 don't  stop\n\nnow"] * 3, 300, pattern))
    bpe = load(path)
    (ids,) = encode(bpe, "1234567 don't  stop\n\nnow ")
    assert decode(bpe, ids) == "1234567 don't  stop\n\nnow "
    words = [bpe.tokenizer.id_to_token(token) for token in ids]
    assert any(len(word) > 3 and word.isdigit() for word in words) == (pattern == "gpt2")


@pytest.mark.parametrize(
    ("asked", "min_frequency", "got"), [(32_000, 1, 266), (32_000, 2, 257), (100, 2, 257)]
)
def test_the_real_size_is_what_counts(
    tmp_path: Path, asked: int, min_frequency: int, got: int
) -> None:
    """A small corpus ends early, and the 256 bytes are always there."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(train(["hello world"], asked, min_frequency=min_frequency))
    assert load(path).vocab_size == got


def test_the_order_of_documents_changes_nothing() -> None:
    """Ties between pairs must not be broken by chance."""
    texts = [f"tok{n % 37} alpha beta {'abcde'[n % 5] * 3}" for n in range(600)]
    assert train(texts, 400) == train(texts[::-1], 400)


def test_a_sample_that_cannot_fit_is_refused() -> None:
    """The machine would swap for an hour before the job is killed."""
    assert training_memory(20_000_000) == pytest.approx(0.39e9, rel=0.01)
    require_memory(1_000_000)
    with pytest.raises(TokenizerError, match="32-bit pair counts"):
        require_memory(10**11)


def test_a_tokenizer_that_loses_text_is_refused(tmp_path: Path) -> None:
    """Without byte-level cutting what has no symbol vanishes, and no id tells of it."""
    path = write_bytes_tokenizer(
        tmp_path / "t.json", pre_tokenizer={"type": "Whitespace"}, normalizer=None
    )
    with pytest.raises(TokenizerError, match="it loses text"):
        load(path)


def test_another_model_than_bpe_is_refused(tmp_path: Path) -> None:
    """A WordPiece has words, and no bytes for what is none of them."""
    path = write_bytes_tokenizer(tmp_path / "t.json")
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    content["model"] = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(TokenizerError, match="a WordLevel model, expected BPE"):
        load(path)
