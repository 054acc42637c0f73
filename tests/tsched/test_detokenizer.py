from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

from tsched.requests.detokenizer import IncrementalDetokenizer, OpenStream
from tsched.requests.sampling_params import SamplingParams
from tsched.requests.token_bytes import PlainTexts, adds_alone, find_token_bytes
from tsched.requests.token_texts import TokenTexts

SPECIAL = 256


def decode_bytes(token_ids: Sequence[int]) -> str:
    """A byte-level decoder, the worst case: every token is one byte. SPECIAL is a token without text."""
    return bytes(t for t in token_ids if t != SPECIAL).decode("utf-8", errors="replace")


def decode_byte_by_byte(token_ids: Sequence[int]) -> str:
    """As decoders with byte fallback do it: every byte of an unfinished character shows as a replacement of its own."""
    data = bytes(token_ids)
    for end in range(len(data), -1, -1):
        try:
            return data[:end].decode() + "\ufffd" * (len(data) - end)
        except UnicodeDecodeError:
            continue
    raise AssertionError("the empty prefix decodes")


class Words:
    """A sentencepiece-like decoder: a word carries its leading space, the first one of a text loses it."""

    words = (" the", " cat", "s", " sat", ".", "\n", " é", " 猫")

    def __call__(self, token_ids: Sequence[int]) -> str:
        return "".join(self.words[t] for t in token_ids).removeprefix(" ")


def feed(detokenizer: IncrementalDetokenizer, token_ids: Sequence[int]) -> list[str]:
    pieces = []
    for token_id in token_ids:
        pieces.append(detokenizer.append(token_id))
        if detokenizer.is_stopped:
            return pieces
    return [*pieces, detokenizer.finish()]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text(max_size=40), specials=st.lists(st.integers(0, 60), max_size=4))
def test_pieces_add_up_and_no_character_is_split(text: str, specials: list[int]) -> None:
    token_ids = list(text.encode())
    for place in specials:
        token_ids.insert(place, SPECIAL)
    pieces = feed(IncrementalDetokenizer(decode_bytes), token_ids)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces if "\ufffd" not in text)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.one_of(st.integers(0, 255), st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0x41, 0xE4])), max_size=200))
def test_bytes_that_are_no_text_come_out_as_the_whole_decodes(token_ids: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(decode_bytes)
    pieces = feed(detokenizer, token_ids)
    assert "".join(pieces) == detokenizer.text == decode_bytes(token_ids)


def test_a_character_comes_out_when_its_last_byte_does() -> None:
    assert feed(IncrementalDetokenizer(decode_bytes), list("aé😀b".encode())) == [
        "a",
        "",
        "é",
        "",
        "",
        "",
        "😀",
        "b",
        "",
    ]
    half = "😀".encode()[:2]
    assert feed(IncrementalDetokenizer(decode_bytes), [*b"a", *half]) == ["a", "", "", "\ufffd"]


def test_a_character_that_shows_as_several_replacements_is_held_back() -> None:
    text = "a😀é猫b"
    pieces = feed(IncrementalDetokenizer(decode_byte_by_byte), list(text.encode()))
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)


def test_spaces_between_tokens_survive() -> None:
    rng = random.Random(0)
    for _ in range(50):
        token_ids = [rng.randrange(8) for _ in range(30)]
        assert "".join(feed(IncrementalDetokenizer(Words()), token_ids)) == Words()(token_ids)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["o t", "two"], "one "),
        ("one two three", ["three", "e t"], "on"),
        ("aaab", ["aab"], "a"),
        ("abcabd", ["abd"], "abc"),
        ("é→ü", ["→"], "é"),
        ("x😀y", ["😀y"], "x"),
        ("nothing here", ["absent"], None),
        ("stop", ["stop"], ""),
    ],
)
def test_stop_strings_span_tokens_and_cut_the_text(text: str, stops: list[str], expected: str | None) -> None:
    detokenizer = IncrementalDetokenizer(decode_bytes, stops)
    feed(detokenizer, list(text.encode()))
    assert detokenizer.is_stopped == (expected is not None)
    assert detokenizer.text == (text if expected is None else expected)


def test_the_earliest_of_several_stop_strings_in_one_piece_counts() -> None:
    detokenizer = IncrementalDetokenizer(
        lambda ids: "".join(("alpha beta gamma", "!")[i] for i in ids), ["gamma", "beta"]
    )
    detokenizer.append(0)
    assert detokenizer.is_stopped
    assert detokenizer.text == "alpha "
    with pytest.raises(RuntimeError, match="ended"):
        detokenizer.append(1)


def test_no_stop_before_it_is_allowed() -> None:
    detokenizer = IncrementalDetokenizer(decode_bytes, ["a", "cd"])
    for byte in b"abc":
        detokenizer.append(byte, may_stop=False)
    detokenizer.append(ord("d"))
    assert detokenizer.is_stopped
    assert detokenizer.text == "ab"


def test_a_stop_string_is_found_in_what_was_held_back() -> None:
    detokenizer = IncrementalDetokenizer(decode_bytes, ["\ufffd"])
    detokenizer.append(ord("a"))
    detokenizer.append(0xF0)
    assert not detokenizer.is_stopped
    detokenizer.finish()
    assert detokenizer.is_stopped
    assert detokenizer.text == "a"


def test_a_window_stays_small() -> None:
    longest = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode_bytes(token_ids)

    detokenizer = IncrementalDetokenizer(decode)
    feed(detokenizer, [0x80] * 1000 + [SPECIAL] * 1000 + list(b"text") * 100)
    assert longest < 150
    assert detokenizer.text == "\ufffd" * 1000 + "text" * 100


@functools.cache
def sentencepiece_like() -> Any:
    """Words with a leading mark for the space, and the 256 bytes for all else, as Llama 2 and Gemma have them."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    words = ["<unk>", "<s>", "\u2581", "\u2581the", "\u2581caf", "s", ".", "a", "b", "\u00fc", "\ufe0f"]
    vocab = {word: i for i, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


CHARACTERS = st.one_of(
    st.sampled_from(["a", "b", " ", "s", "\u00fc", "\u00e9", "\u732b", "\U0001f600", "\u2603\ufe0f", "e\u0301"]),
    st.sampled_from(["\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1eb\U0001f1f7", "\u0928\u093f"]),
    st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"),
)
TEXTS = st.lists(CHARACTERS, max_size=24).map("".join)


def stream_of(tokenizer: Any, skip_special_tokens: bool = False) -> OpenStream:
    """Opens the tokenizers library's own streams."""
    return lambda ids: functools.partial(DecodeStream(ids, skip_special_tokens).step, tokenizer)


def check_every_cut(decode: Any, token_ids: list[int], text: str, open_stream: OpenStream | None = None) -> None:
    """Bug class 17: at every cut the text that is out is a prefix of the whole, and nothing of it is half a character.

    What is out is also all that could be: the whole text of the tokens so far, where that is valid.
    """
    assert decode(token_ids) == text
    detokenizer = IncrementalDetokenizer(decode, open_stream=open_stream)
    pieces = []
    for cut in range(1, len(token_ids) + 1):
        pieces.append(detokenizer.append(token_ids[cut - 1]))
        out = "".join(pieces)
        assert "\ufffd" not in out
        assert text.startswith(out)
        so_far = decode(token_ids[:cut])
        if "\ufffd" not in so_far:
            assert out == so_far
    assert "".join([*pieces, detokenizer.finish()]) == text


@settings(max_examples=150, deadline=None, derandomize=True)
@given(TEXTS)
def test_byte_fallback_pieces_are_cut_at_every_token(text: str) -> None:
    tokenizer = sentencepiece_like()
    ids = tokenizer.encode(text).ids
    check_every_cut(tokenizer.decode, ids, tokenizer.decode(ids))
    check_every_cut(tokenizer.decode, ids, tokenizer.decode(ids), stream_of(tokenizer))
    if not text.startswith(" "):  # the decoder takes one space for the one that the normalizer prepends
        assert tokenizer.decode(ids) == text


TOKENS = st.lists(
    st.one_of(st.integers(0, 10), st.integers(0, 266), st.sampled_from([11 + 0xC3, 11 + 0xA9])), max_size=40
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ids=TOKENS, strips=st.booleans())
def test_known_texts_of_tokens_change_no_piece_of_a_stream(ids: list[int], strips: bool) -> None:
    """Words, lone bytes that are characters, halves of characters and the space at the beginning, in any order."""
    from tokenizers import Tokenizer, decoders

    tokenizer = Tokenizer.from_str(sentencepiece_like().to_str())
    if not strips:  # as Gemma's
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    assert adds_alone(tokenizer)
    open_stream, plain = stream_of(tokenizer), PlainTexts(tokenizer, frozenset())
    found = feed(IncrementalDetokenizer(tokenizer.decode, open_stream=open_stream, plain=plain), ids)
    assert found == feed(IncrementalDetokenizer(tokenizer.decode, open_stream=open_stream), ids)
    known = {token_id for token_id, text in plain.items() if text}
    assert known == {token_id for token_id in ids[1:] if token_id < 11} & plain.keys(), "bytes depend on each other"


def test_texts_of_tokens_are_known_alone_where_the_decoder_is() -> None:
    from tokenizers import decoders

    tokenizer = sentencepiece_like.__wrapped__()
    for decoder in (decoders.WordPiece(), decoders.Metaspace(), decoders.Fuse(), decoders.BPEDecoder(), None):
        tokenizer.decoder = decoder
        assert not adds_alone(tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    assert adds_alone(tokenizer)


def test_a_long_unfinished_run_of_bytes_leaks_nothing() -> None:
    tokenizer = sentencepiece_like()
    text = "\u00e9\u732b\U0001f600" * 3
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    assert tokenizer.decode(ids[:-1]) == "\ufffd" * (len(ids) - 1), "one missing byte hides the whole run"
    check_every_cut(tokenizer.decode, ids, text)
    check_every_cut(tokenizer.decode, ids, text, stream_of(tokenizer))


def test_bytes_that_end_no_character_do_not_repeat_what_is_out() -> None:
    tokenizer = sentencepiece_like()
    ids = [tokenizer.token_to_id(name) for name in ("<0xC3>", "<0xA9>", "<0xF0>", "a", "b")]
    for open_stream in (None, stream_of(tokenizer)):
        detokenizer = IncrementalDetokenizer(tokenizer.decode, open_stream=open_stream)
        assert "".join(feed(detokenizer, ids * 3)) == "\u00e9\ufffdab" * 3


def test_byte_level_pieces_are_cut_at_every_token(checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(TEXTS, st.lists(st.integers(0, 60), max_size=3))
    def check(text: str, specials: list[int]) -> None:
        ids = tokenizer(text)["input_ids"]
        for place in specials:
            ids.insert(place, 0)
        for open_stream in (None, stream_of(tokenizer.backend_tokenizer, True)):
            check_every_cut(lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True), ids, text, open_stream)

    check()


def test_streams_of_any_tokens_give_the_text_of_all_at_once(checkpoint: Path) -> None:
    """Half characters at any place, bytes that are no text, special tokens; and in the time of a stream."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    backend = tokenizer.backend_tokenizer
    texts, calls = TokenTexts(tokenizer), []
    of_bytes = [backend.token_to_id(character) for character in "\u00f0\u0141\u013a\u0122A\u00e4"]  # F0 9F 98 80 41 E4
    assert None not in of_bytes

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(st.lists(st.one_of(st.integers(0, 299), st.sampled_from(of_bytes)), max_size=60))
    def check(ids: list[int]) -> None:
        detokenizer = texts.make_detokenizer(SamplingParams())
        assert detokenizer is not None
        assert "".join(feed(detokenizer, ids)) == detokenizer.text == texts.decode(ids)

    check()
    ids = tokenizer("def scan(line): # \u00fcn\u00efcode \U0001f40d")["input_ids"] * 20 + [0] * 500
    decode = texts.decode
    texts.decode = lambda *given, **named: [calls.append(given), decode(*given, **named)][1]  # type: ignore[method-assign]
    detokenizer = texts.make_detokenizer(SamplingParams())
    assert detokenizer is not None
    assert "".join(feed(detokenizer, ids)) == decode(ids)
    assert not calls, "no window was decoded here"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    text=st.text(alphabet="ab\u00e9\U0001f600", max_size=30),
    stops=st.lists(st.text(alphabet="ab\u00e9\U0001f600", min_size=1, max_size=5), max_size=3),
)
def test_what_is_stable_is_never_taken_back_and_no_more_is_held_than_must_be(text: str, stops: list[str]) -> None:
    detokenizer = IncrementalDetokenizer(decode_bytes, stops)
    shown = ""
    for byte in text.encode():
        detokenizer.append(byte)
        stable = detokenizer.text[: detokenizer.stable_len]
        assert stable.startswith(shown)
        shown = stable
        if detokenizer.is_stopped:
            break
        held = detokenizer.text[len(stable) :]
        assert held == max((held for held in suffixes(detokenizer.text, stops)), key=len, default="")
    found = min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
    detokenizer.finish()
    assert detokenizer.text.startswith(shown)
    if found is None:
        assert detokenizer.text == text


def suffixes(text: str, stops: Sequence[str]) -> list[str]:
    """The ends of `text` that begin a stop string."""
    return [stop[:n] for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]


def test_of_byte_fallback_a_byte_has_a_name_of_six_letters_and_not_every_such_name_is_one() -> None:
    tokenizer = Tokenizer(models.WordLevel({"<0xC3>": 0, "\u2581hello": 1, "?": 2}, unk_token="?"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert [find_token_bytes(tokenizer, token) for token in (0, 1)] == [b"\xc3", b" hello"]
    texts = PlainTexts(tokenizer, frozenset())
    assert (texts[0], texts[1]) == ("", " hello")
