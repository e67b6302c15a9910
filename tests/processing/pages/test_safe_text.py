"""Untrusted text: what is replaced, and that tokens are decoded to exactly their text."""

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.models.byte_tokenizer import encode, make_byte_tokenizer
from trainspan_processing.text.safe_text import visible
from trainspan_processing.text.token_text import Decoder, find_decoder, load_decoder
from trainspan_schemas.errors import UsageError
from trainspan_viewer.html.document import Page, standalone
from trainspan_viewer.html.elements import element


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder(str(make_byte_tokenizer(tmp_path_factory.mktemp("model"))))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\ttext", "plain\n\ttext"),
        ("\x1b]52;c;aGk=\x07", "␛]52;c;aGk=␇"),
        ("\x9b31m", "⟨U+009B⟩31m"),
        ("a\r\x08b\x7f\x00", "a␍␈b⟨U+007F⟩␀"),
        ("abc\u202ecba", "abc⟨U+202E⟩cba"),
        ("\u2066x\u2069\u200b", "⟨U+2066⟩x⟨U+2069⟩⟨U+200B⟩"),
        ("\ud800", "⟨U+D800⟩"),
        *(
            (char, f"⟨U+{ord(char):04X}⟩")
            for char in "\ufe0f\U000e0100\U000e01ef\u3164\u115f\uffa0\u034f\u17b4\u180b\u2800"
        ),
        ("ä 你 👩‍🚀"[:3], "ä 你"),
    ],
)
def test_controls_become_signs_and_letters_stay(text: str, shown: str) -> None:
    assert visible(text) == shown


@given(st.text())
def test_no_control_is_left_whatever_the_text(text: str) -> None:
    left = {char for char in visible(text) if unicodedata.category(char) in ("Cc", "Cs")}
    assert left <= {"\n", "\t"}


@given(st.text())
def test_a_page_gives_every_text_back_as_text(text: str) -> None:
    made = standalone(Page("t", [element("p", text, title=text)]))
    made.encode()
    assert made.count("<p ") == 1
    assert "<script" not in made


@given(st.text(max_size=40))
def test_pieces_of_tokens_join_to_the_text(decoder: Decoder, text: str) -> None:
    encodable = text.encode("utf-8", "ignore").decode()
    ids = encode(decoder.model, encodable)
    pieces = decoder.pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == encodable == decoder.text(ids)


def test_a_character_of_several_tokens_falls_on_its_last(decoder: Decoder) -> None:
    assert decoder.pieces(encode(decoder.model, "a€b")) == ["a", "", "", "€", "b"]


def test_bytes_that_are_no_text_are_shown_and_lose_nothing_after_them(decoder: Decoder) -> None:
    ids = [*encode(decoder.model, "€")[:2], *encode(decoder.model, "ok")]
    assert "".join(decoder.pieces(ids)).endswith("ok")


def test_ids_of_another_vocabulary_are_not_covered(decoder: Decoder) -> None:
    assert decoder.covers([0, 255])
    assert not decoder.covers([1_000_000])


def test_a_model_without_tokenizer_is_none_to_look_for_and_an_error_to_name(tmp_path: Path) -> None:
    assert find_decoder([None, str(tmp_path), "no-such/model"]) is None
    with pytest.raises(UsageError, match=r"no tokenizer\.json"):
        load_decoder(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match="is not a readable tokenizer"):
        load_decoder(str(tmp_path))
