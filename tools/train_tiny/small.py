"""Copying from the window, and small tasks: counting, lists, what comes next."""

import random

from .drafts import Draft, Text, Writer
from .gist import Asked
from .names import EOS, Name, Value
from .templates import QUESTIONS_OF_KIND, Fact

POSITIONS = ("first", "second", "third", "fourth", "fifth")
ORDERS = (
    ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"),
    ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
)
#: what stands before what is copied, and before its copy
COPY_FRAMES = (("Copy:", "Again:"), ("Repeat these words:", "The same words:"), ("", ""), ("Text:", "Copy:"))


def copied_words(rng: random.Random, writer: Writer, count: int) -> list[int]:
    """Ids of made-up and real words in no order."""
    draws, pieces = writer.draws, writer.pieces
    ids: list[int] = []
    share = rng.random()
    for _ in range(count):
        ids += pieces(f" {rng.choice(draws.made_up if rng.random() < share else draws.vocabulary)}")
    return ids


def copy_row(rng: random.Random, writer: Writer, text: Text, room: int) -> Draft:
    """Sequences told twice within 100 tokens, in exact order: words, random tokens, free text; or one repeated on and on."""
    pieces, weights = writer.pieces, writer.weights
    draft = Draft()
    if rng.random() < 0.15:
        ids = rng.choices(writer.draws.tokens, k=rng.randint(3, 60))
        draft.add(ids, 0.0)
        while len(draft) < room:
            draft.add(ids, weights.copy, True)
        return draft
    while len(draft) < room:
        way = rng.random()
        if way < 0.4:
            ids = copied_words(rng, writer, rng.randint(3, 16))[:46]
        elif way < 0.7:
            ids = rng.choices(writer.draws.tokens, k=rng.randint(4, 44))
        else:
            length = rng.randint(8, 46)
            ids = text.ids(text.span(rng, length), length)
            if rng.random() < 0.4:
                rng.shuffle(ids)
        # a line's end ends the copy
        ids = [token for token in ids if token > 2 and not text.is_line_end[token]]
        before, between = COPY_FRAMES[0 if rng.random() < 0.5 else rng.randrange(len(COPY_FRAMES))]
        draft.add(pieces(before), weights.template)
        draft.add(ids, 0.0)
        draft.add(pieces("\n") + pieces(between), weights.template)
        draft.add(ids + pieces("\n"), weights.copy, True)
    return draft


class Small:
    """Small tasks with a question each, many in a row."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer

    def row(self, rng: random.Random, text: Text, room: int) -> Draft:
        """Tasks one after the other, free text between some."""
        writer = self.writer
        draft = Draft()
        while len(draft) < room:
            if rng.random() < 0.3:
                length = rng.randint(10, 60)
                draft.add(text.ids(text.span(rng, length), length), writer.weights.text)
                draft.add(writer.newline, writer.weights.opening)
            before, asked = rng.choice((self.count, self.item, self.following, self.next_word))(rng)
            draft.add(before, 0.0)
            for one in asked:
                fact = Fact("", Name((), False), Value(one.answer, (one.answer,)))
                draft.join(writer.sentence(f"Question: {one.question}\nAnswer: {{v}}\n", fact, False, True))
            if rng.random() < 0.5:
                draft.add([EOS], writer.weights.text)
        return draft

    def _listed(self, words: list[str]) -> list[int]:
        pieces = self.writer.pieces
        ids = list(pieces("Words:"))
        for index, word in enumerate(words):
            ids += (pieces(",") if index else []) + pieces(f" {word}")
        return ids + pieces(".") + pieces("\n")

    def count(self, rng: random.Random) -> tuple[list[int], list[Asked]]:
        """How often a word comes in a short list."""
        kinds = rng.sample(self.writer.draws.words.kinds, rng.randint(1, 3))
        words = [kind for kind in kinds for _ in range(rng.randint(1, 6))]
        rng.shuffle(words)
        asked = [Asked(QUESTIONS_OF_KIND["count"].format(x=kind), str(words.count(kind))) for kind in kinds]
        return self._listed(words), asked[: rng.randint(1, len(asked))]

    def item(self, rng: random.Random) -> tuple[list[int], list[Asked]]:
        """Which word was the third, or the last."""
        draws = self.writer.draws
        pool = draws.words.kinds if rng.random() < 0.4 else draws.words.values if rng.random() < 0.5 else draws.vocabulary
        words = [rng.choice(pool) for _ in range(rng.randint(3, 9))]
        asked = []
        for _ in range(rng.randint(1, 3)):
            index = rng.randrange(min(len(words), len(POSITIONS)))
            part, word = ("last", words[-1]) if rng.random() < 0.25 else (POSITIONS[index], words[index])
            asked.append(Asked(QUESTIONS_OF_KIND["item"].format(part=part), word))
        return self._listed(words), asked

    def following(self, rng: random.Random) -> tuple[list[int], list[Asked]]:
        """What comes after Monday, before March."""
        order = rng.choice(ORDERS)
        index = rng.randrange(1, len(order))
        if rng.random() < 0.5:
            return [], [Asked(f"What comes after {order[index - 1]}?", order[index])]
        return [], [Asked(f"What comes before {order[index]}?", order[index - 1])]

    def next_word(self, rng: random.Random) -> tuple[list[int], list[Asked]]:
        """What comes after a word of a list."""
        words = rng.sample(self.writer.draws.vocabulary, rng.randint(4, 8))
        index = rng.randrange(1, len(words) - 1)
        return self._listed(words), [Asked(f"Which word comes after {words[index - 1]}?", words[index])]
