"""Text as it comes out: stop strings, characters of several bytes, and the scores of tokens."""

import itertools
import random

import pytest

from tigon.generation.settings import GenerationSettings
from tigon.serve.answer import Answer, Piece, StopFilter, TokenTexts
from tigon.tokenizer import Tokenizer

TEXT = "the model reads some of these words"


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: up to the stop string that ends first, of several the longest."""
    for end in range(len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def test_stop_strings_in_any_pieces() -> None:
    draw = random.Random(0)
    for _ in range(500):
        text = "".join(draw.choices("aab", k=draw.randint(0, 12)))
        stops = [
            "".join(draw.choices("ab", k=draw.randint(1, 4))) for _ in range(draw.randint(1, 3))
        ]
        bounds = sorted(draw.choices(range(len(text) + 1), k=3))
        filter, shown = StopFilter(stops), ""
        expected, found = cut(text, stops)
        for start, stop in itertools.pairwise([0, *bounds, len(text)]):
            shown += filter.feed(text[start:stop])
            assert expected.startswith(shown), (text, stops, bounds)
            if filter.found:
                break
        assert filter.found == found
        assert shown + filter.finish() == expected, (text, stops, bounds)


def test_text_is_held_back_no_longer_than_needed() -> None:
    filter = StopFilter(["abc", "bd"])
    assert [filter.feed(c) for c in "xaabxb"] == ["x", "", "a", "", "abx", ""]


def write(tokenizer: Tokenizer, text: str, most: int = 99, **options: object) -> list[Piece]:
    """The pieces of an answer that says a text, token by token."""
    settings = GenerationSettings(eos_token_id=(0,), stop_strings=options.pop("stop", ()))
    answer = Answer([5], settings, most, tokenizer, streams=True, **options)
    pieces = []
    for token in [*tokenizer.encode(text), 0]:
        row = [float(token), -0.5, *range(20), *[-1.0] * 20]
        answer.append(row)
        pieces.append(answer.take())
    assert answer.ended and not answer.take().text
    return pieces


def test_characters_are_never_cut(tokenizer: Tokenizer) -> None:
    text = "aé漢🙂"
    assert len(tokenizer.encode(text)) == 10
    pieces = [piece.text for piece in write(tokenizer, text)]
    assert [piece for piece in pieces if piece] == list(text)
    *_, last = write(tokenizer, text, most=8)[:8]  # ends inside of a character
    assert (last.text, last.finish_reason) == ("\ufffd", "length")


@pytest.mark.parametrize("stop", ["some", " so", "s", "words of", "<|im_end|>"])
def test_tokens_are_scored_as_far_as_the_text_goes(tokenizer: Tokenizer, stop: str) -> None:
    texts = TokenTexts(tokenizer)
    pieces = write(tokenizer, TEXT, stop=(stop,), texts=texts, top=2)
    shown = "".join(piece.text for piece in pieces)
    expected, _ = cut(TEXT, [stop])
    assert shown == expected
    scored = [token for piece in pieces for token in piece.scored]
    said = "".join(token.text for token in scored)
    assert expected.startswith(said) and len(expected) - len(said) < 6  # a token that is cut
    assert [token.offset for token in scored] == [
        sum(len(t.text) for t in scored[:i]) for i in range(len(scored))
    ]
    assert all(len(token.top) == 2 and token.logprob == -0.5 for token in scored)
    length = 0
    for piece in pieces:  # a token comes with its text, not before
        length += len(piece.text)
        assert all(token.end <= length for token in piece.scored)


@pytest.mark.parametrize("last", ["", "🙂 ends"])
def test_bytes_of_a_stop_string_are_not_scored(tokenizer: Tokenizer, last: str) -> None:
    texts = TokenTexts(tokenizer)
    before = len(tokenizer.encode("aé"))
    pieces = write(tokenizer, f"aé漢{last}", stop=("漢",), texts=texts)
    scored = [token for piece in pieces for token in piece.scored]
    assert (scored[-1].end, len(scored)) == (2, before)
    # Without the stop string the bytes come with the character that they make
    pieces = write(tokenizer, "aé漢", texts=texts)
    assert [(piece.text, len(piece.scored)) for piece in pieces if piece.text] == [
        ("a", 1), ("é", before - 1), ("漢", len(tokenizer.encode("漢")))
    ]  # fmt: skip
    # An answer that ends inside of a character has all of its tokens
    pieces = write(tokenizer, "aé漢", most=before + 1, texts=texts)
    assert sum(len(piece.scored) for piece in pieces) == before + 1
