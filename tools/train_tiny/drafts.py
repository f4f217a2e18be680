"""Rows in the making: ids with their loss weights, free text from the corpus, and facts with questions written into it."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .names import EOS, Draws, Name, Pieces
from .templates import (
    ASSISTANT_MARKER,
    BARE_COMPLETIONS,
    BARE_QUESTIONS,
    BARE_STATEMENTS,
    BARE_UPDATES,
    COMPLETIONS,
    FRAMES,
    QUESTIONS,
    STATEMENTS,
    UPDATES,
    USER_MARKER,
    Fact,
    Template,
    attribute_ids,
    compile_template,
    name_ids,
    value_ids,
)


@dataclass(frozen=True, slots=True)
class Weights:
    """Loss weight of predicting a token, by what it is. A value's first mention is random and weighs nothing."""

    text: float = 1.0
    answer: float = 8.0
    end: float = 4.0  # the sign that ends an answer
    silent: float = 1.0  # the space before an answer's first digit
    copy: float = 1.0
    template: float = 0.3
    name: float = 0.1  # in a statement; in a question a name can be known and weighs as its template
    opening: float = 0.0  # of what is written into a text: free text must not learn to expect it


class Draft:
    """Ids of a row with weights and answer marks, grown from the left."""

    __slots__ = ("answer", "ids", "weights")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.weights: list[float] = []
        self.answer: list[bool] = []

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, ids: list[int], weight: float, is_answer: bool = False) -> None:
        """Appends ids of one weight."""
        self.ids += ids
        self.weights += [weight] * len(ids)
        self.answer += [is_answer] * len(ids)

    def join(self, other: "Draft") -> None:
        """Appends another draft."""
        self.ids += other.ids
        self.weights += other.weights
        self.answer += other.answer

    def open(self, count: int, weight: float) -> None:
        """Gives the first tokens another weight."""
        for index in range(min(count, len(self.ids))):
            if not self.answer[index]:
                self.weights[index] = weight


class Document(TypedDict):
    """A document of the corpus, as its data directory describes it; offset and length in tokens."""

    source: str
    title: str
    kind: str
    offset: int
    length: int


class Text:
    """Tokens of a text, its documents and the places between its sentences."""

    def __init__(self, tokens: NDArray[np.uint16], documents: list[Document], tokenizer: Tokenizer) -> None:
        self.tokens = tokens
        self.documents = documents
        self.starts = np.array([one["offset"] for one in self.documents], np.int64)
        spellings = [tokenizer.decode([index]) for index in range(tokenizer.get_vocab_size())]
        ends = np.zeros(1 << 16, np.bool_)
        ends[: len(spellings)] = [one.rstrip(" \"'”’)").endswith((".", "!", "?", "\n")) for one in spellings]
        goes_on = np.zeros(1 << 16, np.bool_)
        goes_on[: len(spellings)] = [one[:1] == " " and len(one) > 1 and not one[1].islower() for one in spellings]
        #: by token id; a document's end ends a line too
        self.is_line_end = [one.endswith("\n") or index == EOS for index, one in enumerate(spellings)]
        line_ends = np.zeros(1 << 16, np.bool_)
        line_ends[: len(spellings)] = self.is_line_end
        self._tables = ends, goes_on, line_ends
        self.cuts = self.cuts_of(self.tokens)

    def cuts_of(self, tokens: NDArray[np.uint16]) -> NDArray[np.int64]:
        """Places p where tokens may be cut: a sentence ends before p, and a new one or a line begins at p."""
        ends, goes_on, line_ends = self._tables
        return 1 + np.flatnonzero(ends[tokens[:-1]] & (goes_on[tokens[1:]] | line_ends[tokens[:-1]]))

    def span(self, rng: random.Random, length: int) -> int:
        """A random place with `length` tokens after it."""
        return rng.randrange(max(len(self.tokens) - length, 1))

    def span_to_end(self, rng: random.Random, length: int) -> int:
        """A random place such that `length` tokens after it a sentence ends, if one does near there."""
        start = self.span(rng, length)
        index = int(np.searchsorted(self.cuts, start + length, side="right"))
        back = start + length - int(self.cuts[index - 1]) if index else 0
        return start - back if back <= min(start, 200) else start

    def ids(self, start: int, length: int) -> list[int]:
        """`length` tokens from a place, round the end of the corpus if it must be."""
        ids: list[int] = self.tokens[start : start + length].tolist()
        while len(ids) < length:
            ids += self.tokens[: length - len(ids)].tolist()
        return ids

    def places(self, rng: random.Random, start: int, length: int, count: int) -> list[int]:
        """`count` sorted offsets in a span, at ends of sentences where there are enough."""
        low, high = np.searchsorted(self.cuts, (start, start + length)).tolist()
        if high - low < 1:
            return sorted(rng.choice((0, length)) for _ in range(count))
        some = sorted(rng.randrange(low, high) for _ in range(count)) if count > (high - low) // 2 else sorted(
            rng.sample(range(low, high), count))  # fmt: skip
        offsets: list[int] = (self.cuts[some] - start).tolist()
        return offsets


def read_text(data_dir: Path, part: str, tokenizer: Tokenizer) -> Text:
    """A part of the corpus, train or val."""
    documents = json.loads((data_dir / "documents.json").read_text())[part]
    tokens = np.memmap(data_dir / f"{part}.u16", dtype=np.uint16, mode="r")
    return Text(tokens, [one for one in documents if one["length"] > 0], tokenizer)


@dataclass(slots=True)
class Written:
    """What is written into a text: as it is after a sentence, and how it is rendered at the start of a line."""

    draft: Draft
    at_line: Callable[[], Draft]


@dataclass(frozen=True, slots=True)
class Wording:
    """The templates that one document draws from."""

    statements: tuple[str, ...]
    questions: tuple[str, ...]
    frames: tuple[str, ...]
    completions: tuple[str, ...]


class Varies(Protocol):
    """Wordings that no list has: variation.py."""

    def template(self, rng: random.Random, text: str, wraps: bool = False) -> str: ...

    def question(self, rng: random.Random, text: str) -> str: ...

    def frame(self, rng: random.Random, text: str) -> str: ...

    def woven(self, rng: random.Random, fact: Fact) -> tuple[Draft, Draft] | None: ...


class Writer:
    """Facts and questions as drafts, in the wordings of one split.

    variation, varied  what varies a wording, and the share of wordings that it varies.
    relations          statements and questions of facts that have a relation, by its name.
    """

    def __init__(self, pieces: Pieces, split: str, weights: Weights) -> None:
        self.pieces = pieces
        self.draws = Draws(pieces, split)
        self.weights = weights
        self.split = split
        self.newline = pieces("\n")
        tokenizer = pieces.tokenizer
        self.has_markers = None not in (tokenizer.token_to_id(USER_MARKER), tokenizer.token_to_id(ASSISTANT_MARKER))
        self.all = Wording(STATEMENTS[split], QUESTIONS[split], FRAMES[split], COMPLETIONS[split])
        self.bare = Wording(BARE_STATEMENTS[split], BARE_QUESTIONS[split], FRAMES[split], BARE_COMPLETIONS[split])
        self.updates = UPDATES[split]
        self.bare_updates = BARE_UPDATES[split]
        self.completed = 0.12  # share of documents whose questions are sentences to be completed
        self.variation: Varies | None = None
        self.varied = 0.0
        self.relations: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self._templates: dict[tuple[str, bool], Template] = {}

    def template(self, text: str, is_spaced: bool) -> Template:
        """A compiled template."""
        key = (text, is_spaced)
        template = self._templates.get(key)
        if template is None:
            if self.variation is not None:  # most are used once
                return compile_template(text, self.pieces, is_spaced, True)
            template = self._templates[key] = compile_template(text, self.pieces, is_spaced)
        return template

    def varies(self, rng: random.Random) -> Varies | None:
        """What varies the next wording, if anything does."""
        return self.variation if self.varied and rng.random() < self.varied else None

    def wording(self, rng: random.Random) -> Wording:
        """One document's wordings: often one of each, as people keep to a form, often all of them."""
        everything = self.all
        way = rng.random()
        if way < 0.3:
            return everything
        frame = everything.frames[0] if rng.random() < 0.5 else rng.choice(everything.frames)
        question = everything.questions[0] if rng.random() < 0.4 else rng.choice(everything.questions)
        statement = everything.statements[0] if rng.random() < 0.25 else rng.choice(everything.statements)
        return Wording(
            (statement,) if way < 0.65 else everything.statements,
            (question,) if rng.random() < 0.5 else everything.questions,
            (frame,),
            everything.completions,
        )

    def sentence(self, text: str, fact: Fact, is_spaced: bool, asks: bool) -> Draft:
        """A fact in words. `asks`: its value is an answer, and so is the sign that ends it."""
        pieces, weights = self.pieces, self.weights
        key_weight = weights.template if asks else weights.name
        draft = Draft()
        ends_answer = False
        for part in self.template(text, is_spaced):
            if part.slot == "v":
                ids, silent = value_ids(pieces, fact.value, part.is_spaced)
                if asks:
                    draft.add(ids[:silent], weights.silent)
                    draft.add(ids[silent:], weights.answer, True)
                    ends_answer = True
                else:
                    draft.add(ids, 0.0)
            elif part.slot == "n":
                draft.add(name_ids(pieces, fact.name, part.is_spaced, part.is_capital), key_weight)
            elif part.slot == "a":
                draft.add(attribute_ids(pieces, fact.attribute, part.is_spaced), key_weight)
            elif ends_answer:
                draft.add(list(part.ids[:1]), weights.end, True)
                draft.add(list(part.ids[1:]), weights.template)
                ends_answer = False
            else:
                draft.add(list(part.ids), weights.text if part.ids == (EOS,) else weights.template)
        return draft

    def statement(self, rng: random.Random, wording: Wording, fact: Fact, is_update: bool = False) -> Written:
        """A fact to be written into a text."""
        variation = self.varies(rng)
        if fact.relation:
            template = rng.choice(self.relations[fact.relation][0])
        elif fact.name.words:
            if variation and not is_update and rng.random() < 0.4 and (woven := variation.woven(rng, fact)):
                spaced, at_line = woven
                return Written(spaced, lambda: at_line)
            template = rng.choice(self.updates if is_update else wording.statements)
        else:
            template = rng.choice(self.bare_updates if is_update else self.bare.statements)
        if variation and not is_update and (not fact.relation or rng.random() < 0.2):
            template = variation.template(rng, template, True)
        return Written(self.written_in(rng, template, fact, False, False),
                       lambda: self.written_in(rng, template, fact, True, False))  # fmt: skip

    def question_words(self, rng: random.Random, wording: Wording, fact: Fact) -> str:
        """A question's template, without its frame."""
        if fact.relation:
            return rng.choice(self.relations[fact.relation][1])
        text = rng.choice(wording.questions if fact.name.words else self.bare.questions)
        variation = self.varies(rng)
        return variation.question(rng, text) if variation else text

    def question(self, rng: random.Random, wording: Wording, fact: Fact, after_line: bool, completes: bool = False) -> Draft:
        """A question with its answer, or the fact's sentence to be completed."""
        if completes and not fact.relation:
            completions = wording.completions if fact.name.words else self.bare.completions
            variation = self.varies(rng)
            if variation:  # any statement that ends with the value, in other words
                all_of_them = (self.all if fact.name.words else self.bare).statements
                completions = tuple(text for text in all_of_them if text.endswith(" {v}.")) or completions
            text = rng.choice(completions)
            return self.written_in(rng, variation.template(rng, text) if variation else text, fact, after_line, True)
        frame, variation = rng.choice(wording.frames), self.varies(rng)
        if variation:
            frame = variation.frame(rng, frame)
        text = frame.replace("{q}", self.question_words(rng, wording, fact))
        draft = Draft()
        if not after_line:
            draft.add(self.newline, self.weights.template)
        draft.join(self.sentence(text, fact, False, True))
        return draft

    def written_in(self, rng: random.Random, text: str, fact: Fact, after_line: bool, asks: bool) -> Draft:
        """A sentence: alone in a line, or among others."""
        on_line = after_line or text[0] in "|{" or rng.random() < 0.3
        draft = Draft()
        if on_line and not after_line:
            draft.add(self.newline, self.weights.template)
        draft.join(self.sentence(text, fact, not on_line, asks))
        if on_line:
            draft.add(self.newline, self.weights.template)
        return draft


def draw_facts(rng: random.Random, draws: Draws, count: int, is_hard: bool) -> list[Fact]:
    """Facts with keys that differ, `count` or, seldom, fewer. Hard: keys of a small grid, like others in two of three words."""
    keys: dict[tuple[str, Name], None] = {}
    if is_hard:
        side = 2
        while side**3 < 2 * count:
            side += 1
        words = draws.words
        attributes = draws.some(rng, words.attributes, side, 0.3)
        if rng.random() < 0.6:
            firsts = draws.some(rng, words.adjectives, side)
            seconds, has_article = draws.some(rng, words.nouns, side), True
        else:
            firsts = rng.sample(words.first_names, min(side, len(words.first_names)))
            seconds, has_article = rng.sample(words.last_names, min(side, len(words.last_names))), False
        grid = len(attributes) * len(firsts) * len(seconds)
        while len(keys) < min(count, grid * 0.9):
            keys[rng.choice(attributes), Name((rng.choice(firsts), rng.choice(seconds)), has_article)] = None
    if not keys and rng.random() < 0.08:
        # about nothing but themselves: few, as each attribute can be there once
        adjectives = ("", "", "secret ", *(f"{word} " for word in rng.sample(draws.words.adjectives, 3)))
        for _ in range(min(count, 8)):
            keys[rng.choice(adjectives) + draws.attribute(rng), Name((), False)] = None
        return [Fact(attribute, name, draws.value(rng, attribute)) for attribute, name in keys]
    way = rng.random()
    draw = draws.thing if way < 0.3 else draws.person if way < 0.45 else draws.odd if way < 0.6 else draws.name
    same = rng.choice(draws.words.attributes) if rng.random() < 0.4 else ""
    tries = 0
    while len(keys) < count:
        tries += 1
        if tries > count:
            draw, same = draws.odd, ""
        keys[same or draws.attribute(rng), draw(rng)] = None
    return [Fact(attribute, name, draws.value(rng, attribute)) for attribute, name in keys]


def fact_document(
    rng: random.Random, text: Text, writer: Writer, length: int, facts: list[Fact], num_questions: int, *,
    interleaves: bool, has_updates: bool = False,
) -> Draft:  # fmt: skip
    """Free text with facts at random depths and questions between or at the end, `length` tokens in all.

    Questions that have no room are left out, then facts that nothing asks for.
    """
    wording = writer.wording(rng)
    facts = facts[:]
    rng.shuffle(facts)
    asked = facts[:num_questions]
    rng.shuffle(facts)

    completes = rng.random() < writer.completed

    def ask(fact: Fact) -> Written:
        by_completion = completes or rng.random() < 0.03
        return Written(writer.question(rng, wording, fact, False, by_completion),
                       lambda: writer.question(rng, wording, fact, True, by_completion))  # fmt: skip

    told = [(fact, writer.statement(rng, wording, fact)) for fact in facts]
    asks = [(fact, ask(fact)) for fact in asked]
    excess = sum(len(one.draft) for _, one in told) + sum(len(one.draft) for _, one in asks) - (length - 6)
    while excess > 0 and len(asks) > max(1, len(told) // 3):
        excess -= len(asks.pop()[1].draft)
    kept = {id(fact) for fact, _ in asks}
    for index in range(len(told) - 1, -1, -1):
        if excess > 0 and id(told[index][0]) not in kept:
            excess -= len(told.pop(index)[1].draft)
    while excess > 0 and len(asks) > 1:
        gone = asks.pop()
        index = next(i for i, (fact, _) in enumerate(told) if fact is gone[0])
        excess -= len(gone[1].draft) + len(told.pop(index)[1].draft)
    if has_updates:
        # the first telling has another value, the last one counts
        for fact, _ in asks[: max(1, len(asks) // 2)]:
            index = next(i for i, (one, _) in enumerate(told) if one is fact)
            old = Fact(fact.attribute, fact.name, writer.draws.value(rng, fact.attribute))
            new = writer.statement(rng, wording, fact, True)
            if excess + len(new.draft) <= 0:
                told[index] = (fact, new)
                told.insert(rng.randint(0, index), (old, writer.statement(rng, wording, old)))
                excess += len(new.draft)
    if not interleaves:
        return lay_out(rng, text, writer, length, [one for _, one in told], [one.at_line() for _, one in asks])
    order: list[tuple[Fact | None, Written]] = [*told]
    for fact, one in asks:
        index = max(i for i, (other, _) in enumerate(order) if other is fact)
        order.insert(rng.randint(index + 1, len(order)), (None, one))
    return lay_out(rng, text, writer, length, [one for _, one in order], [])


def lay_out(rng: random.Random, text: Text, writer: Writer, length: int, written: list[Written], closing: list[Draft]) -> Draft:
    """Drafts written into free text at random places, others at its end; `length` tokens in all if they have room."""
    weights, newline, line_end = writer.weights, writer.newline[0], text.is_line_end
    last = sum(map(len, closing))
    filler = max(length - sum(len(one.draft) for one in written) - last - 1, 0)
    slack = 8 * len(written) + 8
    start = slack + text.span_to_end(rng, filler + slack)
    end = start + filler
    places = text.places(rng, start, filler, len(written))
    before = text.tokens[[start + place - 1 for place in places]].tolist() if places else []
    total = last
    drafts: list[Draft] = []
    done = -1
    for place, token, one in zip(places, before, written):
        previous = drafts[-1].ids[-1] if place == done else token
        draft = one.draft
        if line_end[previous]:
            if draft.ids[0] == newline:
                draft.ids, draft.weights, draft.answer = draft.ids[1:], draft.weights[1:], draft.answer[1:]
            else:
                draft = one.at_line()
        if place != done:
            draft.open(4, weights.opening)
        done = place
        total += len(draft)
        drafts.append(draft)
    needs_line = bool(closing) and not line_end[int(text.tokens[end - 1]) if done < filler or not drafts else drafts[-1].ids[-1]]
    total += needs_line
    # drafts are shorter or longer at the start of a line: the text begins earlier or later by that
    filler = max(length - total, 0)
    ids = text.ids(end - filler, filler)
    shift = end - filler - start
    row = Draft()
    done = 0
    for place, draft in zip(places, drafts):
        if place - shift > done:
            row.add(ids[done : place - shift], weights.text)
            done = place - shift
        row.join(draft)
    row.add(ids[done:], weights.text)
    if needs_line:
        row.add([newline], weights.opening)
    for index, draft in enumerate(closing):
        if not index:
            draft.open(3, weights.opening)
        row.join(draft)
    return row
