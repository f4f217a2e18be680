"""Questions of the evaluation: prompts of any length with their answers, from held-out text and either split's words.

A prompt is a prefix, which many questions share, and the question. `is_right` reads what a model wrote after it.
"""

import random
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .drafts import Draft, Text, Weights, Wording, Writer, draw_facts, read_text
from .gist import Gist
from .names import BOS, SPLITS, Name, Pieces, Value
from .small import copied_words
from .templates import COMPLETIONS, FRAMES, QUESTIONS, STATEMENTS, Fact

#: what a held-out wording is made of; each is a kind in which it alone is of the split, "question+frame" one of both
FACTORS = ("statement", "question", "frame", "completion", "attribute", "name", "value")
KINDS = (
    "recall", "hard", "words", "templates", "wording", "updated", "gist", "majority", "language", "labels", "window", *FACTORS,
)  # fmt: skip
STRIP = 512  # tokens of the held-out text that stay together in prefixes longer than it
MARGIN = 24  # tokens of a prompt's length kept for its answer


@dataclass(frozen=True, slots=True)
class Question:
    """One question about a text."""

    prefix: NDArray[np.uint16]  # the text; the same array for all questions about it
    ids: tuple[int, ...]  # the question, up to where the answer begins
    answer: str
    answer_ids: tuple[int, ...]  # with the sign that ends it
    depth: float  # where in the prefix the answer lies, 0 to 1; of gist the end of the part, of window 1

    @property
    def prompt(self) -> list[int]:
        """Ids of text and question."""
        return [*self.prefix.tolist(), *self.ids]


def is_kind(kind: str) -> bool:
    """Whether `questions` can ask it: one of KINDS, or factors with "+" between."""
    return kind in KINDS or set(kind.split("+")) <= set(FACTORS)


def is_right(written: str, answer: str) -> bool:
    """Whether a text that a model wrote begins with the answer and no more of its kind."""
    written = written.strip()
    rest = written.removeprefix(answer)
    return written.startswith(answer) and not rest[:1].isalnum() and not (rest[:1] in ".,:-" and rest[1:2].isdigit())


@lru_cache(maxsize=4)
def _sources(data_dir: str, split: str) -> tuple[Text, Writer]:
    pieces = Pieces(Tokenizer.from_file(f"{data_dir}/tokenizer.json"))
    return read_text(Path(data_dir), "val", pieces.tokenizer), Writer(pieces, split, Weights())


def questions(data_dir: Path | str, seed: int, length_tokens: int, facts: int, kind: str, split: str = "train") -> list[Question]:
    """`facts` questions whose prompts have at most `length_tokens` tokens, answers included.

    recall     one text with `facts` facts evenly spread, in the main wording: "The code of the blue door is 4821."
    hard       the same, keys that share two of three words with others
    words      the same as recall with words as values
    templates  the same as recall, each fact and question in a wording of the split
    wording    the same, and any name, digits of any length, words, codes
    updated    the same as recall, each fact told twice; the later value, "now", is the answer
    FACTORS    the same as recall with words of training, this factor (or several: "question+frame") of the split, any of its
               kind: how facts are told and asked, the frame round a question, the sentence to complete; attributes, names, values
    gist       `facts` texts, one question each: majority, language or labels, or one of these by its name
    window     one text, and words to be repeated in order
    split      whose words and templates: "train" or "held-out". The text is held out always.
    Raises     ValueError if facts have no room, or for an unknown kind or split.
    """
    if not is_kind(kind) or split not in SPLITS:
        raise ValueError(f"kind {kind!r}, split {split!r}: allowed are {', '.join(KINDS)} and {', '.join(SPLITS)}")
    if facts < 1 or length_tokens < 1:
        raise ValueError(f"{facts} facts, {length_tokens} tokens: 1 or more")
    text, writer = _sources(str(data_dir), split)
    rng = random.Random(f"{seed} {length_tokens} {facts} {kind} {split}")
    if kind == "window":
        return _window(rng, text, writer, length_tokens, facts)
    if kind in ("gist", "majority", "language", "labels"):
        return _gist(rng, text, writer, length_tokens, facts, None if kind == "gist" else kind)
    if set(kind.split("+")) <= set(FACTORS):
        return _recall(rng, text, _sources(str(data_dir), "train")[1], length_tokens, facts, kind, writer)
    return _recall(rng, text, writer, length_tokens, facts, kind, writer)


def filler(rng: random.Random, text: Text, length: int) -> NDArray[np.uint16]:
    """Held-out text of `length` tokens: as it stands, or its strips in random order, again and again."""
    if length < 2 * STRIP:
        start = text.span(rng, length)
        return np.array(text.ids(start, length), np.uint16)
    cuts = text.cuts[np.minimum(np.searchsorted(text.cuts, np.arange(0, len(text.tokens), STRIP)), len(text.cuts) - 1)]
    cuts = np.unique(cuts)
    strips = [text.tokens[a:b] for a, b in pairwise(cuts.tolist())]
    strips = [strip for strip in strips if len(strip) <= 2 * STRIP] or [text.tokens[:]]
    parts: list[NDArray[np.uint16]] = []
    have = 0
    while have < length:
        rng.shuffle(strips)
        parts += strips
        have += sum(map(len, strips))
    return np.concatenate(parts)[:length]


def _question(prefix: NDArray[np.uint16], draft: Draft, answer: str, depth: float) -> Question:
    """Cuts a question with its answer in two."""
    first = draft.answer.index(True)
    last = len(draft) - draft.answer[::-1].index(True)
    # the space before a digit belongs to the answer: the prompt's own end is never a space
    while draft.weights[first - 1] == Weights().silent and first > 0:
        first -= 1
    return Question(prefix, tuple(draft.ids[:first]), answer, tuple(draft.ids[first:last]), depth)


def _recall(
    rng: random.Random, text: Text, writer: Writer, length: int, count: int, kind: str, other: Writer
) -> list[Question]:  # fmt: skip
    """Of FACTORS: `other` writes those that `kind` names."""
    factors = kind.split("+")
    wording = writer.all
    if kind not in ("templates", "wording"):
        main = {"statement": STATEMENTS, "question": QUESTIONS, "frame": FRAMES, "completion": COMPLETIONS}
        told_in, *asked_in = (every[other.split] if factor in factors else every["train"][:1] for factor, every in main.items())
        wording = Wording(told_in, *asked_in)
    keys: list[Fact] = []
    while len(keys) < count:
        keys = draw_facts(rng, writer.draws, count, kind == "hard")
    if kind not in ("hard", "wording"):
        keys = _things(rng, writer, count, factors, other)
    told = [_valued(rng, other if "value" in factors else writer, fact, kind) for fact in keys]
    statements = [(index, writer.statement(rng, wording, fact, kind == "updated")) for index, fact in enumerate(told)]
    rng.shuffle(statements)
    if kind == "updated":
        old = [(-1, writer.statement(rng, wording, _valued(rng, writer, fact, kind))) for fact in told]
        for index, _ in statements[:]:
            at = next(i for i, (which, _) in enumerate(statements) if which == index)
            statements.insert(rng.randint(0, at), old[index])
    asked = [writer.question(rng, wording, fact, True, "completion" in factors) for fact in told]
    room = length - 1 - max(map(len, asked)) - MARGIN - sum(len(one.draft) + 2 for _, one in statements)
    if room < 8 * count:
        raise ValueError(f"{count} facts have no room in {length} tokens")
    free = filler(rng, text, room)
    cuts = text.cuts_of(free)
    cuts = cuts if len(cuts) else np.arange(1, room)
    parts: list[NDArray[np.uint16]] = [np.array([BOS], np.uint16)]
    have, done = 1, 0
    places: dict[int, int] = {}
    for index, (which, statement) in enumerate(statements):
        target = int(room * (index + rng.random()) / len(statements))
        place = max(int(cuts[min(int(np.searchsorted(cuts, target)), len(cuts) - 1)]), done)
        if place > done:
            parts.append(free[done:place])
        have += place - done
        previous = int(parts[-1][-1])
        draft = statement.at_line() if text.is_line_end[previous] else statement.draft
        parts.append(np.array(draft.ids, np.uint16))
        places[which] = have
        have += len(draft)
        done = place
    # the text ends with a sentence, as a person's would
    parts += [free[done : max(int(cuts[-1]), done)], np.array(writer.newline, np.uint16)]
    prefix = np.concatenate(parts)
    return [
        _question(prefix, asked[i], told[i].value.text, places[i] / len(prefix))
        for i in sorted(range(count), key=places.__getitem__)
    ]


def _things(rng: random.Random, writer: Writer, count: int, factors: list[str], other: Writer) -> list[Fact]:
    """Facts about things, with keys that differ; of FACTORS, attributes or names are of `other`, names then anything's."""
    attributes = (other if "attribute" in factors else writer).draws.words.attributes
    draw = other.draws.name if "name" in factors else writer.draws.thing
    keys: dict[tuple[str, Name], None] = {}
    while len(keys) < count:
        keys[rng.choice(attributes), draw(rng)] = None
    return [Fact(attribute, name, Value("", ())) for attribute, name in keys]


def _valued(rng: random.Random, writer: Writer, fact: Fact, kind: str) -> Fact:
    """With a value of the kind: four digits, a word, or anything."""
    draws = writer.draws
    if kind == "words":
        return Fact(fact.attribute, fact.name, draws.word(rng))
    if kind == "wording":
        return fact
    if "value" in kind.split("+"):
        return Fact(fact.attribute, fact.name, draws.value(rng, fact.attribute))
    value = draws.digits(rng)
    while len(value.text) != 4 or not value.text.isdigit():
        value = draws.digits(rng)
    return Fact(fact.attribute, fact.name, value)


def _gist(rng: random.Random, text: Text, writer: Writer, length: int, count: int, what: str | None) -> list[Question]:
    gist = Gist(writer, text)
    found: list[Question] = []
    for _ in range(count):
        document, asked = gist.document(rng, length - 1 - MARGIN, what)
        one = rng.choice(asked)
        prefix = np.array([BOS, *document.ids], np.uint16)
        found.append(_question(prefix, gist.ask(one), one.answer, 0.5))
        if len(prefix) + len(found[-1].ids) + len(found[-1].answer_ids) > length:
            raise ValueError(f"a text to be understood has no room in {length} tokens")
    return found


def _window(rng: random.Random, text: Text, writer: Writer, length: int, count: int) -> list[Question]:
    pieces = writer.pieces
    frame = pieces("Copy:"), pieces("\n") + pieces("Again:")
    sequences = [copied_words(rng, writer, rng.randint(6, 12))[:40] for _ in range(count)]
    room = length - 2 - 2 * max(map(len, sequences)) - sum(map(len, frame)) - MARGIN
    if room < 1:
        raise ValueError(f"words to be repeated have no room in {length} tokens")
    prefix = np.concatenate([np.array([BOS], np.uint16), filler(rng, text, room), np.array(writer.newline, np.uint16)])
    found = []
    for ids in sequences:
        answer = pieces.tokenizer.decode(ids).strip()
        found.append(Question(prefix, (*frame[0], *ids, *frame[1]), answer, (*ids, *writer.newline), 1.0))
    return found
