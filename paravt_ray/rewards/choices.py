"""Which option a free-text reply to a multiple-choice question declares."""

from __future__ import annotations

import re

_LETTER = re.compile(r"(?<![\w'’-])([A-Ja-j])(?![\w'’-])")
_MARK = r"[\s:=,.({\[*\"'`$\\]*"
_FILLER = r"(?:is|be|are|was|would|should|must|to|the|an?|option|choice|letter|final|correct|right|best|text)"
_DECLARED_BEFORE = re.compile(
    rf"\b(?:answer|answered|choose|chose|pick|select|go\s+with|boxed|(?:correct|right|best)\s+(?:option|choice|letter|one))"
    rf"\b{_MARK}(?:{_FILLER}\b{_MARK})*$",
    re.IGNORECASE,
)
_DECLARED_AFTER = re.compile(
    r"[)\]}*\"'`]*\s+(?:is|must\s+be|seems|looks)\s+(?:the\s+)?(?:correct|right|best|answer)", re.IGNORECASE
)
_HINTED_BEFORE = re.compile(
    rf"(?:\b(?:option|choice|letter|so|therefore|thus|hence|then|but|say|is|be|it's|that's|probably|likely|definitely)\b"
    rf"|→|=>|->){_MARK}(?:{_FILLER}\b{_MARK})*$",
    re.IGNORECASE,
)
_NEGATED_BEFORE = re.compile(
    r"(?:\b(?:not|never|neither|nor|than|instead\s+of|except)|n['’]t)\s+(?:\w+\s+)?[(\[*]*$", re.I
)
_BARE = re.compile(r"[\W_]*(?:(?:the|option|choice|answer|letter|boxed|text|is)\b[\W_]*)*([A-J])[\W_]*", re.IGNORECASE)
_LABEL = re.compile(
    r"[\s(\[*\"'`]*([A-J]|[a-j](?=[).]))[)\]*\"'`]*(?:(?<=[)\]*])|[.:,)]|\s*[–—-](?=\s)|\n|(?=\s+(?:because|since|as)\b))(?!\w)"
)
_LABELS = re.compile(r"(?:^|(?<=[\s,;(]))([A-J])[.):]")
_ALSO_AFTER = re.compile(
    r"[)\]}*\"'`]*\s*(?:[,/;&|+]|\bor\b|\band\b)\s*(?:or\b|and\b)?\s*(?:option\b)?[\s(\[*\"'`]*"
    r"(?:[B-HJ](?![\w'’])|[AI](?![\w'’]|\s+[a-z]))"
)
_ALSO_BEFORE = re.compile(
    r"(?<![\w'’])[A-J][)\]}*\"'`]*\s*(?:[,/;&|+]\s*(?:or|and)?|\bor\b|\band\b)\s*(?:option)?[\s(\[*]*$"
)
_SENTENCE_START = re.compile(r"(?:^|[.!?:\n])[\s\"'`*(\[]*$")
_WORD_AFTER = re.compile(r"\s+([a-z]+)")
_NO_NOUN = frozenset(["because", "since", "as", "is", "and", "or", "but", "which", "so", "with", "by", "from", "due"])
_CONTEXT = 60


def chosen_option(reply: str) -> str | None:
    """The option letter A to J that a reply settles on, or None where it names none or several at once.

    A single letter counts where it is all there is, as the label in front ("B. a red car"), or where the reply declares
    it ("the answer is B", "so D"); the last declaration wins. The article "A", the pronoun "I", letters inside words,
    and negated ones ("not B") are no options; a list of letters is none either.
    """
    bare = _BARE.fullmatch(reply)
    if bare:
        return bare[1].upper()
    declared: list[re.Match[str]] = []
    hinted: list[re.Match[str]] = []
    bracketed: list[re.Match[str]] = []
    for letter in _LETTER.finditer(reply):
        before = reply[max(0, letter.start() - _CONTEXT) : letter.start()]
        if not _can_be_option(reply, letter, before):
            continue
        if _DECLARED_BEFORE.search(before) or _DECLARED_AFTER.match(reply, letter.end()):
            declared.append(letter)
        elif letter[1].isupper() and _HINTED_BEFORE.search(before):
            hinted.append(letter)
        elif before.endswith(("(", "[")) and reply[letter.end() : letter.end() + 1] in (")", "]"):
            bracketed.append(letter)
    if declared:
        return _unless_listed(reply, declared[-1])
    label = _LABEL.match(reply)
    if label:
        several = {label[1].upper(), *_LABELS.findall(reply)}
        return label[1].upper() if len(several) == 1 and not _ALSO_AFTER.match(reply, label.end(1)) else None
    if hinted:
        return _unless_listed(reply, hinted[-1])
    return bracketed[0][1].upper() if len({match[1].upper() for match in bracketed}) == 1 else None


def _can_be_option(reply: str, letter: re.Match[str], before: str) -> bool:
    """Whether a lone letter may name an option: no article, no pronoun, not negated."""
    after = reply[letter.end() : letter.end() + _CONTEXT]
    if _NEGATED_BEFORE.search(before):
        return False
    if letter[1].islower():
        return not after.strip(" \t\n.)]}*\"'`$") or (before.endswith(("(", "[")) and after[:1] in (")", "]"))
    word = _WORD_AFTER.match(after)
    if word is None or word[1] in _NO_NOUN:
        return True
    return letter[1] != "I" and not (letter[1] == "A" and _SENTENCE_START.search(before))


def _unless_listed(reply: str, letter: re.Match[str]) -> str | None:
    """The letter, or None where it is one of a list such as "B or C"."""
    before = reply[max(0, letter.start() - _CONTEXT) : letter.start()]
    if _ALSO_AFTER.match(reply, letter.end()) or _ALSO_BEFORE.search(before):
        return None
    return letter[1].upper()
