"""Training rows made from a data directory: free text, recall, copying, the gist of far parts, small tasks, stories.

`Rows(data_dir, seed, length, mix).batch(n)` gives stacked arrays. A row depends on seed, worker and index alone. The ids of
what is written are put together from pieces that were tokenised once; the tokenizer is never called for a row.
`exam.questions` makes the evaluation's prompts with the same writers and the held-out words.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .chats import Chats
from .drafts import Draft, Text, Weights, Writer, draw_facts, fact_document, read_text
from .exam import questions as questions
from .gist import Gist
from .names import BOS, EOS, SPLITS, Pieces
from .relations import RELATIONS, draw_related
from .samples import sample
from .small import Small, copy_row
from .stories import Stories
from .templates import Fact
from .variation import Variation

PLAIN_TOKENS = 40_000  # of made-up text that facts are written into
KINDS = ("text", "recall", "copy", "gist", "other", "story")


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares of the kinds of rows (they need not add up to 1), and how recall rows are made."""

    text: float = 0.40
    recall: float = 0.36
    copy: float = 0.07
    gist: float = 0.10
    other: float = 0.04
    story: float = 0.03
    packed: float | None = None  # share of recall rows of short documents; none: half up to 512 tokens, a tenth above
    chat: float = 0.12  # share of recall rows that are chats
    hard: float = 0.5
    interleaved: float = 0.35
    updated: float = 0.05
    plain: float = 0.1  # recall documents whose text is not the corpus but stories, repeated sentences, words in no order
    most_facts: float = 1 / 24  # per token
    drop_c128: float = 0.25  # of recall rows: without the entries of 128 tokens
    drop_c4: float = 0.5  # of gist rows: without the entries of 4 tokens
    varied: float = 0.0  # share of statements, questions and frames in wordings that no list has
    related: float = 0.0  # share of documents whose facts are of relations.py
    words: float = 0.0  # share of values that are words whatever they are values of
    completed: float = 0.12  # share of fact documents whose questions are sentences to be completed
    single: float = 0.0  # share of chats in which text and question are one turn
    gaps: float = 0.0  # share of rows whose positions jump once, by up to a million
    bos: float = 0.5  # rows that begin with the first token of a text; others begin anywhere
    weights: Weights = field(default_factory=Weights)

    @property
    def shares(self) -> tuple[float, ...]:
        """In the order of KINDS."""
        return (self.text, self.recall, self.copy, self.gist, self.other, self.story)


@dataclass(frozen=True, slots=True)
class Row:
    """One row, S+1 tokens.

    weights  loss weight of predicting ids[t].   answer  tokens that count as answers.   kind  index into KINDS.
    drop_c4, drop_c128  the model should do without these entries in this row.
    """

    ids: NDArray[np.uint16]  # [S+1]
    weights: NDArray[np.float32]  # [S+1]
    answer: NDArray[np.bool_]  # [S+1]
    kind: int
    drop_c4: bool
    drop_c128: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows stacked; fields as in Row."""

    ids: NDArray[np.uint16]  # [n, S+1]
    weights: NDArray[np.float32]  # [n, S+1]
    answer: NDArray[np.bool_]  # [n, S+1]
    kind: NDArray[np.uint8]  # [n]
    drop_c4: NDArray[np.bool_]  # [n]
    drop_c128: NDArray[np.bool_]  # [n]


class Rows:
    """An endless row of rows of `length` + 1 tokens. Workers of one seed make different rows."""

    def __init__(self, data_dir: Path | str, seed: int, length: int, mix: Mix, worker: int = 0) -> None:
        data_dir = Path(data_dir)
        self.length = length
        self.mix = mix
        self.index = 0
        self._seed = (seed << 20 | worker) << 40
        pieces = Pieces(Tokenizer.from_file(str(data_dir / "tokenizer.json")))
        self.text = read_text(data_dir, "train", pieces.tokenizer)
        self.writer = Writer(pieces, "train", mix.weights)
        self.writer.draws.meet(pieces.tokenizer.decode(self.text.tokens[: 3 << 20].tolist()))
        self.writer.draws.words_share = mix.words
        self.writer.completed = mix.completed
        if mix.varied:
            self.writer.variation = Variation(self.text, pieces, self.writer.draws.common, mix.weights)
            self.writer.varied = mix.varied
        self.writer.relations = {name: (one.statements, one.questions) for name, one in RELATIONS.items()}
        self.gist = Gist(self.writer, self.text)
        self.chats = Chats(self.writer, self.text) if self.writer.has_markers else None
        self.small = Small(self.writer)
        self.stories = Stories(self.writer)
        plain = np.array(self.stories.tokens(random.Random(0), PLAIN_TOKENS), np.uint16)
        self.plain = Text(plain, [], pieces.tokenizer)
        packed = mix.packed
        self._packed = packed if packed is not None else 0.5 if length <= 512 else 0.1

    def batch(self, n: int) -> Batch:
        """The next n rows."""
        rows = [self.row(self.index + i) for i in range(n)]
        self.index += n
        return Batch(
            np.stack([row.ids for row in rows]),
            np.stack([row.weights for row in rows]),
            np.stack([row.answer for row in rows]),
            np.array([row.kind for row in rows], np.uint8),
            np.array([row.drop_c4 for row in rows], np.bool_),
            np.array([row.drop_c128 for row in rows], np.bool_),
        )

    def row(self, index: int) -> Row:
        """The row of an index."""
        rng = random.Random(self._seed + index)
        kind = rng.choices(range(len(KINDS)), self.mix.shares)[0]
        size = self.length + 1
        draft = Draft()
        if rng.random() < self.mix.bos and KINDS[kind] != "text":
            draft.add([BOS], 0.0)
        drop_c4 = drop_c128 = False
        room = size - len(draft)
        match KINDS[kind]:
            case "text":
                draft.join(self._text(rng, room))
            case "recall":
                drop_c128 = rng.random() < self.mix.drop_c128
                draft.join(self._recall(rng, room, size == room))
            case "copy":
                draft.join(copy_row(rng, self.writer, self.text, room))
            case "gist":
                drop_c4 = rng.random() < self.mix.drop_c4
                draft.join(self.gist.row(rng, room))
            case "other":
                draft.join(self.small.row(rng, self.text, room))
            case "story":
                draft.join(self.stories.row(rng, room))
        if len(draft) < size:
            draft.join(self._text(rng, size - len(draft)))
        weights = np.array(draft.weights[:size], np.float32)
        weights[0] = 0.0
        ids, answer = np.array(draft.ids[:size], np.uint16), np.array(draft.answer[:size], np.bool_)
        return Row(ids, weights, answer, kind, drop_c4, drop_c128)

    def _text(self, rng: random.Random, room: int) -> Draft:
        """Free text from any place, or from the start of a document."""
        text = self.text
        draft = Draft()
        start = text.span(rng, room)
        if rng.random() < self.mix.bos:
            draft.add([BOS], 0.0)
            document = int(np.searchsorted(text.starts, start, side="right")) - 1
            start = int(text.starts[max(document, 0)]) if rng.random() < 0.3 else start
        draft.add(text.ids(start, room - len(draft)), self.mix.weights.text)
        return draft

    def _recall(self, rng: random.Random, room: int, begins: bool) -> Draft:
        """Facts and questions in one document, or in many short ones."""
        mix = self.mix
        draft = Draft()
        if self.chats and rng.random() < mix.chat:
            while room - len(draft) > 64:
                length = rng.randint(64, min(room - len(draft), 64 + room // rng.choice((1, 2, 6))))
                count = rng.randint(1, max(1, min(16, length // 44)))
                facts = self._facts(rng, count)
                begin = begins or len(draft) > 0
                if mix.single and rng.random() < mix.single:
                    draft.join(self.chats.single(rng, length, facts, begin))
                else:
                    draft.join(self.chats.chat(rng, length, facts, rng.randint(1, len(facts)), begin))
            return draft
        if rng.random() < self._packed:
            while len(draft) < room:
                length = rng.randint(48, 256)
                most = min(6, max(1, length // 34))
                count = rng.randint(1, most)
                facts = self._facts(rng, count)
                draft.join(self._document(rng, length - 1, facts, rng.randint(1, len(facts))))
                draft.add([EOS], mix.weights.text)
            return draft
        most = max(2, int(room * mix.most_facts))
        way = rng.random()
        count = 1 if way < 0.08 else most if way < 0.25 else rng.randint(2, most)
        facts = self._facts(rng, count)
        count = len(facts)
        asked = rng.randint(max(1, count // 4), count)
        draft.join(self._document(rng, room, facts, min(asked, max(1, room // 48))))
        return draft

    def _facts(self, rng: random.Random, count: int) -> list[Fact]:
        if self.mix.related and rng.random() < self.mix.related:
            return draw_related(rng, self.writer.draws, count)
        return draw_facts(rng, self.writer.draws, count, rng.random() < self.mix.hard)

    def _document(self, rng: random.Random, length: int, facts: list[Fact], asked: int) -> Draft:
        mix = self.mix
        text = self.plain if rng.random() < mix.plain else self.text
        return fact_document(rng, text, self.writer, length, facts, asked,
                             interleaves=rng.random() < mix.interleaved, has_updates=rng.random() < mix.updated)  # fmt: skip


def sample_texts(seed: int, count: int) -> list[str]:
    """Short synthetic texts for a tokenizer's training: every template, every word of both splits."""
    return [sample(random.Random(f"{seed} {index}"), SPLITS[index % 2]) for index in range(count)]
