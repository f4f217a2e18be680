"""Wordings that no list has: words of a template changed, added, left out; facts woven into sentences of the corpus; new labels.

A model that has seen listed wordings alone looks for these; one that has seen a name and a value among any words looks for both.
"""

import random
import re

import numpy as np
from numpy.typing import NDArray

from .drafts import Draft, Text, Weights
from .names import EOS, Pieces
from .templates import Fact, attribute_ids, name_ids, value_ids

_SLOT = re.compile(r"(\{[anNvq]\})")
_WORD = re.compile(r"( ?)([A-Za-z]{2,})")
WRAPPED = ('"{v}"', "'{v}'", "({v})", "**{v}**", "[{v}]", "<{v}>", "#{v}", "`{v}`", "_{v}_")
SIGNS = (":", ":", ":", ":", " -", " =", ">", ".", ")", " :", "?", ",")
BETWEEN = ("\n", "\n", "\n", " ", "\n\n")
OPENINGS = (
    "Please, ", "Hello. ", "Now ", "So ", "And ", "One thing: ", "Sorry, ", "Well, ", "OK. ", "Let us see. ", "Hm, ",
    "By the way, ",
    "Quickly: ", "Again: ", "Last question. ", "Think well. ", "You read it above. ", "From what was said before: ",
)  # fmt: skip
ENDINGS = (" Only the {a}.", " Be short.", " Answer in one word.", " Thanks.", " I forgot.", " Please.", " Say it exactly.",
           " Hm?")  # fmt: skip
MOST_WOVEN, LEAST_WOVEN = 42, 5  # tokens of a sentence that a fact is woven into


class Variation:
    """Varied wordings in the words of a corpus."""

    def __init__(self, text: Text, pieces: Pieces, words: list[str], weights: Weights) -> None:
        """text: the corpus.   words: its common words, none held out."""
        self.text, self.pieces, self.words, self.weights = text, pieces, words, weights
        tokenizer = pieces.tokenizer
        spellings = [tokenizer.decode([index]) for index in range(tokenizer.get_vocab_size())]
        #: by token id: a new word begins with it; a sentence that has it is not woven into
        self._begins = np.array([len(one) > 1 and one[0] == " " and one[1].isalpha() for one in spellings])
        self._breaks = np.array(
            [index <= EOS or "\n" in one or any(map(str.isdigit, one)) for index, one in enumerate(spellings)]
        )
        self._spellings = spellings

    def template(self, rng: random.Random, text: str, wraps: bool = False) -> str:
        """A template with some of its words changed; the slots stay. `wraps`: its value may stand between signs."""
        if "{{" in text or text[0] == "|":
            return text
        strength = rng.choice((0.1, 0.3, 0.3, 0.6, 0.9))

        def swap(match: re.Match[str]) -> str:
            space, word = match.groups()
            way = rng.random() / strength
            if way >= 1.0:
                return match.group()
            if way > 0.85 and space:
                return ""
            new = rng.choice(self.words)
            new = new.capitalize() if word[0].isupper() else new
            return f"{space}{word} {new}" if way > 0.65 else f"{space}{new}"

        parts = [part if part[:1] == "{" else _WORD.sub(swap, part) for part in _SLOT.split(text)]
        varied = "".join(parts)
        if wraps and rng.random() < 0.12 and " {v}" in varied:
            varied = varied.replace("{v}", rng.choice(WRAPPED), 1)
        if wraps and rng.random() < 0.2 and varied.endswith("."):
            some = " ".join(rng.choice(self.words) for _ in range(rng.randint(1, 4)))
            varied = f"{varied[:-1]}, {some}."
        if wraps and rng.random() < 0.15:
            some = " ".join(rng.choice(self.words) for _ in range(rng.randint(1, 4)))
            varied = f"{some.capitalize()}{rng.choice((':', ',', '.'))} {varied}"
        return varied

    def question(self, rng: random.Random, text: str) -> str:
        """A question's template with some words changed, sloppy now and then."""
        way = rng.random()
        if way < 0.3 and "{a}" in text and "{n}" in text and (woven := self._woven_question(rng)):
            return woven
        varied = self.template(rng, text) if way < 0.8 else text
        if rng.random() < 0.15:
            varied = rng.choice(OPENINGS) + varied
        if rng.random() < 0.08:
            varied += rng.choice(ENDINGS) if "{a}" in text else ENDINGS[1]
        if rng.random() < 0.12 and varied[0] != "{":
            varied = varied[0].lower() + varied[1:].rstrip("?.")
        return varied

    def _woven_question(self, rng: random.Random) -> str | None:
        """Some words of the corpus with an attribute and a name among them."""
        found = self._sentence(rng)
        if found is None:
            return None
        words = [self._spellings[token] for token in found[0].tolist()]
        if any("{" in word or "}" in word or "<" in word for word in words):
            return None
        starts = [0, *found[1].tolist(), len(words)]
        first = rng.randrange(len(starts) - 1)
        last = min(first + rng.randint(2, 7), len(starts) - 1)
        parts = ["".join(words[a:b]) for a, b in zip(starts[first:last], starts[first + 1 : last + 1])]
        groups = rng.choice(
            (
                (" the {a} of {n}",), (" {n}'s {a}",), (" the {a} that {n}",), (" {n} {a}",), (" the {a} {n}",), (" {a} of {n}",),
                (" the {a}", " {n}"), (" {n}", " the {a}"), (" {a}", " {n}"), (" {n}", " its {a}"), (" which {a}", " {n}"),
                (" what {a}", " {n}"), (" {n}", " what {a}"), (" the {a} which {n}",),
            )
        )  # fmt: skip
        at = sorted(rng.randint(0, len(parts)) for _ in groups)
        for place, group in reversed(list(zip(at, groups))):
            parts.insert(place, group)
        text = "".join(parts).strip().rstrip(".,;:!?")
        text = text if text[0] == "{" or rng.random() < 0.15 else text[0].upper() + text[1:]
        return text + rng.choice(("?", "?", ".", ".", "", "!"))

    def _sentence(self, rng: random.Random) -> tuple[NDArray[np.uint16], NDArray[np.int64]] | None:
        """Tokens of a sentence of the corpus that follows another, and the places of its words but the first."""
        text = self.text
        for _ in range(6):
            index = rng.randrange(len(text.cuts) - 1)
            start, end = int(text.cuts[index]), int(text.cuts[index + 1])
            tokens = text.tokens[start:end]
            if LEAST_WOVEN <= end - start <= MOST_WOVEN and not self._breaks[tokens].any():
                places = np.flatnonzero(self._begins[tokens[1:]]) + 1
                if len(places) >= 3 and self._begins[tokens[0]]:
                    return tokens, places
        return None

    def frame(self, rng: random.Random, text: str) -> str:
        """A frame with some words changed, or two labels that no list has."""
        if rng.random() < 0.4:
            return self.template(rng, text)
        sign, between = rng.choice(SIGNS), rng.choice(BETWEEN)
        asking = f"{self._label(rng)}{sign} " if rng.random() < 0.8 else ""
        return f"{asking}{{q}}{between}{self._label(rng)}{sign} {{v}}\n"

    def _label(self, rng: random.Random) -> str:
        label = rng.choice(self.words).capitalize()
        if rng.random() < 0.15:
            label += f" {rng.choice(self.words)}"
        return label.upper() if rng.random() < 0.08 else label

    def woven(self, rng: random.Random, fact: Fact) -> tuple[Draft, Draft] | None:
        """A fact in a sentence of the corpus: attribute, name and value between any of its words; None if none was found.

        Twice: after a sentence, and at the start of a line.
        """
        pieces, weights = self.pieces, self.weights
        found = self._sentence(rng)
        if found is None:
            return None
        tokens, places = found
        the = pieces(" the") if rng.random() < 0.7 else []
        attribute = ([*the, *attribute_ids(pieces, fact.attribute, True)], weights.name)
        name = (name_ids(pieces, fact.name, True, False), weights.name)
        value = (value_ids(pieces, fact.value, True)[0], 0.0)
        of = (pieces(" of"), weights.template)
        groups = rng.choice(
            (
                ([attribute, of, name], [value]),
                ([attribute, name], [value]),
                ([name], [attribute, value]),
                ([name, attribute], [value]),
                ([name, value], [attribute]),
                ([attribute, value], [name]),
                ([value], [attribute, of, name]),
                ([name], [attribute], [value]),
                ([attribute], [name], [value]),
                ([name, attribute, value],),
            )
        )
        at = sorted(rng.sample(places.tolist(), len(groups)))
        ids = tokens.tolist()
        drafts = []
        for first in ([ids[0]], pieces(self._spellings[ids[0]].lstrip())):
            draft = Draft()
            draft.add(list(first), weights.template)
            done = 1
            for place, group in zip(at, groups, strict=True):
                draft.add(ids[done:place], weights.template)
                for part, weight in group:
                    draft.add(list(part), weight)
                done = place
            draft.add(ids[done:], weights.template)
            drafts.append(draft)
        drafts[1].add(pieces("\n"), weights.template)
        return drafts[0], drafts[1]
