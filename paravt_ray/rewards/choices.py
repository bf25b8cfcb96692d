r"""Which option a free-text reply to a multiple-choice question declares.

A choice, from the surest form to the least sure:

    the letter is all there is    B · (c) · **D** · \boxed{B} · The answer is B.
    it is declared                I go with option B · I think B is correct · The answer is B. Wait, the answer is D.
    it stands in front            B. a red car · (C) five · D - five · B because it is red
    words lead up to it           he stops, so D · I think it is B
    it stands in brackets         It is certainly the red one (B)

No choice:

    articles, pronouns, names     A man · The answer is a red car · I think so · Vitamin C
    what is negated               It is not B · It isn't C · neither A nor B
    several at once               B or C · the answer is B or C · A, B, C, D · A. car B. bus · (A) or (B)
"""

from __future__ import annotations

import re

# ---- pieces of the patterns below, which are all read with re.VERBOSE ------------------------------------------------

_QUOTES = r"*\"'`"
"""Marks that people put around a letter, for a character class."""
_OPENING = rf"[\s(\[{_QUOTES}]*"
_CLOSING = rf"[)\]}}{_QUOTES}]*"
_PUNCTUATION = rf"[\s:=,.({{\[$\\{_QUOTES}]*"
_UP_TO_THE_LETTER = rf"""
    {_PUNCTUATION}
    (?: (?: is | be | are | was | would | should | must | to | the | an? | option | choice | letter
          | final | correct | right | best | text ) \b {_PUNCTUATION} )*
    $
"""
"""What may stand between the word that announces a letter and the letter: "the answer | would be: option | B"."""

# ---- a letter, and what says that it is the choice -------------------------------------------------------------------

_LETTER = re.compile(r"(?<! [\w'’-] ) ( [A-Ja-j] ) (?! [\w'’-] )", re.VERBOSE)
_BARE = re.compile(
    r"""
    [\W_]*
    (?: (?: the | option | choice | answer | letter | boxed | text | is ) \b [\W_]* )*
    ( [A-J] )
    [\W_]*
    """,
    re.VERBOSE | re.IGNORECASE,
)
_DECLARED_BEFORE = re.compile(
    rf"""
    \b (?: answer | answered | choose | chose | pick | select | go\s+with | boxed
         | (?: correct | right | best ) \s+ (?: option | choice | letter | one ) ) \b
    {_UP_TO_THE_LETTER}
    """,
    re.VERBOSE | re.IGNORECASE,
)
_DECLARED_AFTER = re.compile(
    rf"{_CLOSING} \s+ (?: is | must\s+be | seems | looks ) \s+ (?: the\s+ )? (?: correct | right | best | answer )",
    re.VERBOSE | re.IGNORECASE,
)
_HINTED_BEFORE = re.compile(
    rf"""
    (?: \b (?: option | choice | letter | so | therefore | thus | hence | then | but | say | is | be | it's | that's
             | probably | likely | definitely ) \b
      | → | => | -> )
    {_UP_TO_THE_LETTER}
    """,
    re.VERBOSE | re.IGNORECASE,
)
_LABEL = re.compile(
    rf"""
    {_OPENING}
    ( [A-J] | [a-j] (?= [).] ) )
    [)\]{_QUOTES}]*
    (?: (?<= [)\]*] )                                # (B) a red car, **B** a red car
      | [.:,)]                                       # B. a red car
      | \s* [–—-] (?= \s )                           # B - a red car
      | \n
      | (?= \s+ (?: because | since | as ) \b ) )
    (?! \w )
    """,
    re.VERBOSE,
)
_LABELS = re.compile(r"(?: ^ | (?<= [\s,;(] ) ) ( [A-J] ) [.):]", re.VERBOSE)

# ---- what says that a letter is none, or not the only one ------------------------------------------------------------

_NEGATED_BEFORE = re.compile(
    r"(?: \b (?: not | never | neither | nor | than | instead\s+of | except ) | n['’]t ) \s+ (?: \w+\s+ )? [(\[*]* $",
    re.VERBOSE | re.IGNORECASE,
)
_ALSO_AFTER = re.compile(
    rf"""
    {_CLOSING} \s*
    (?: [,/;&|+] | \b or \b | \b and \b ) \s* (?: or \b | and \b )?
    \s* (?: option \b )? {_OPENING}
    (?: [B-HJ] (?! [\w'’] )
      | [AI] (?! [\w'’] | \s+[a-z] ) )               # neither the article nor the pronoun
    """,
    re.VERBOSE,
)
_ALSO_BEFORE = re.compile(
    rf"""
    (?<! [\w'’] ) [A-J] {_CLOSING} \s*
    (?: [,/;&|+] \s* (?: or | and )? | \b or \b | \b and \b )
    \s* (?: option )? [\s(\[*]* $
    """,
    re.VERBOSE,
)
_SENTENCE_START = re.compile(rf"(?: ^ | [.!?:\n] ) {_OPENING} $", re.VERBOSE)
_WORD_AFTER = re.compile(r"\s+([a-z]+)")
_NO_NOUN = frozenset(["because", "since", "as", "is", "and", "or", "but", "which", "so", "with", "by", "from", "due"])
"""Words that can follow the letter of an option, but not an article."""

_CONTEXT = 60
"""Characters before and after a letter that are looked at: a long reply takes time in proportion to its length."""


def chosen_option(reply: str) -> str | None:
    """The option letter A to J that a reply settles on, or None where it names none or several at once.

    The surest form that there is decides. Of several letters that are declared, or that words lead up to, the last one
    counts, and where that is one of a list, nothing is chosen.
    """
    bare = _BARE.fullmatch(reply)
    if bare:
        return bare[1].upper()
    letters = [letter for letter in _LETTER.finditer(reply) if _can_be_option(letter)]
    declared = [letter for letter in letters if _is_declared(letter)]
    if declared:
        return _unless_listed(declared[-1])
    label = _LABEL.match(reply)
    if label:
        alone = {label[1].upper(), *_LABELS.findall(reply)} == {label[1].upper()}
        return label[1].upper() if alone and not _ALSO_AFTER.match(reply, label.end(1)) else None
    hinted = [letter for letter in letters if letter[1].isupper() and _HINTED_BEFORE.search(_before(letter))]
    if hinted:
        return _unless_listed(hinted[-1])
    bracketed = {letter[1].upper() for letter in letters if _is_bracketed(letter)}
    return bracketed.pop() if len(bracketed) == 1 else None


def _before(letter: re.Match[str]) -> str:
    return letter.string[max(0, letter.start() - _CONTEXT) : letter.start()]


def _after(letter: re.Match[str]) -> str:
    return letter.string[letter.end() : letter.end() + _CONTEXT]


def _can_be_option(letter: re.Match[str]) -> bool:
    """Whether a lone letter may name an option: no article, no pronoun, not negated."""
    before, after = _before(letter), _after(letter)
    if _NEGATED_BEFORE.search(before):
        return False
    if letter[1].islower():  # at the end of the reply, or in brackets
        return not after.strip(" \t\n.)]}*\"'`$") or _is_bracketed(letter)
    word = _WORD_AFTER.match(after)
    if word is None or word[1] in _NO_NOUN:
        return True
    return letter[1] != "I" and not (letter[1] == "A" and _SENTENCE_START.search(before))


def _is_declared(letter: re.Match[str]) -> bool:
    before_it = _DECLARED_BEFORE.search(_before(letter))
    return bool(before_it or _DECLARED_AFTER.match(letter.string, letter.end()))


def _is_bracketed(letter: re.Match[str]) -> bool:
    return _before(letter).endswith(("(", "[")) and _after(letter).startswith((")", "]"))


def _unless_listed(letter: re.Match[str]) -> str | None:
    """The letter, or None where it is one of a list such as "B or C"."""
    if _ALSO_AFTER.match(letter.string, letter.end()) or _ALSO_BEFORE.search(_before(letter)):
        return None
    return letter[1].upper()
