"""Words that synthetic documents are about: attributes, names and values, those of training and those held out for tests.

Every word list has two splits. A generator made for one split draws from that split alone, so no held-out word is ever in a
synthetic part of a training row; free text from the corpus may hold any English word.
"""

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from tokenizers import Tokenizer

BOS, EOS = 0, 1
SPLITS = ("train", "held-out")


@dataclass(frozen=True, slots=True)
class Words:
    """The word lists of one split."""

    number_attributes: tuple[str, ...]  # what mostly has digits as its value
    word_attributes: tuple[str, ...]  # what mostly has a word
    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    first_names: tuple[str, ...]
    last_names: tuple[str, ...]
    values: tuple[str, ...]  # words that are values
    kinds: tuple[str, ...]  # things that are counted and listed

    @property
    def attributes(self) -> tuple[str, ...]:
        """Every attribute."""
        return self.number_attributes + self.word_attributes


def _lists(**words: str) -> Words:
    return Words(**{field: tuple(text.replace(" ", "\n").replace("_", " ").split("\n")) for field, text in words.items()})


WORDS = {
    "train": _lists(
        number_attributes="code price weight age number key height size score phone_number room_number year magic_number length "
        "ticket cost total PIN",
        word_attributes="password colour city nickname secret_word owner pet country sign favourite_fruit name place",
        adjectives="blue red green black white yellow brown grey old new small large long short high low heavy light dark bright "
        "quick slow quiet loud warm cold clean wet dry round flat sharp soft hard thin thick empty full rich poor wild plain "
        "strong weak",
        nouns="door box house car book table chair boat ship tree garden river bridge road tower lamp clock bag bottle cup "
        "plate coat hat shoe ring stone wall window room bed bird dog cat horse cow sheep fish bear lion wolf farm shop school "
        "church hill field lake island train wheel key card letter picture machine engine knife bell flag basket",
        first_names="Anna Ben Clara David Emma Frank Grace Henry Ida Jack Kate Leo Maria Nora Oscar Paul Rosa Sam Tom Vera "
        "Will Alice Peter John Mary Lucy George Ella Max Nina",
        last_names="Lund Smith Brown Green Hill Wood Stone Baker Cook Fisher King Young White Black Gray Hall Parker Turner "
        "Miller Walker Carter Bell Ward Moss Frost Berg Dahl Novak Rossi Klein",
        values="red blue green yellow black white grey brown orange pink Paris London Rome Berlin Madrid Vienna Oslo Boston "
        "apple pear plum cherry lemon peach grape banana cat dog horse mouse rabbit fox bear goose oak rose lily iron silver "
        "stone water fire snow wind summer winter spring river forest bread butter honey salt north south Monday Friday June "
        "March France Spain Norway China Egypt India",
        kinds="cat dog bird cow horse sheep fish apple pear cup book hat ball boat tree flower chair stone bell key",
    ),
    "held-out": _lists(
        number_attributes="depth width speed budget temperature serial_number",
        word_attributes="motto hobby flavour hometown",
        adjectives="purple silent frozen crooked dusty hollow tiny striped golden gentle rusty narrow",
        nouns="dragon castle ladder guitar pillow rocket anchor kettle mirror bucket candle hammer pencil violin tunnel lantern",
        first_names="Hugo Stella Victor Wanda Felix Greta Ralph Sonia",
        last_names="Archer Quinn Tanaka Olsen Barlow Jensen Moreau Castle",
        values="purple violet crimson Lisbon Dublin Prague Athens mango papaya walnut tiger camel zebra falcon copper marble "
        "thunder autumn saffron Brazil Kenya cotton pepper",
        kinds="goat duck frog spoon coin candle melon turtle",
    ),
}

#: made-up languages: each has its own first sounds, vowels and endings, so a few words tell it and one place need not
LANGUAGES = {
    "Alban": ("b br d dr g l m", "a o", "nd rm lb nt"),
    "Corish": ("k kr t s sk p", "i e", "ss kt st x"),
    "Emmic": ("m n l w r", "e u", "m n l"),
    "Farlan": ("f v th h sh", "a i", "f th sh r"),
    "Gondi": ("g z j d gr", "o u", "ng z d gg"),
    "Ostrin": ("p t pl tr st", "o i", "p t ck pt"),
}
SPLIT_SEEDS = {"train": 11, "held-out": 12}


def language_words(language: str, split: str, count: int = 75) -> list[str]:
    """Made-up words of one language; the two splits share its letter statistics and no word."""
    starts, vowels, ends = (part.split() for part in LANGUAGES[language])
    rng = random.Random(f"{language} words")
    words: list[str] = []
    while len(words) < 3 * count:
        word = "".join(rng.choice(starts) + rng.choice(vowels) for _ in range(rng.randint(1, 2))) + rng.choice(ends)
        if word not in words:
            words.append(word)
    return words[: 2 * count] if split == "train" else words[2 * count :]


@cache
def made_up_words(split: str, count: int) -> tuple[str, ...]:
    """Words that mean nothing: easy to say, random letters, or two words in one; no word is in both splits."""
    rng = random.Random(SPLIT_SEEDS[split])
    starts, vowels = (part.split() for part in ("b bl c d dr f g h j k l m n p r s st t tr v w z", "a e i o u ar en il or"))
    syllables = [start + vowel for start in starts for vowel in vowels]
    letters = "abcdefghijklmnopqrstuvwxyz"
    lists = WORDS[split]
    parts = lists.adjectives + lists.nouns
    found: dict[str, None] = {}
    while len(found) < count:
        way = rng.random()
        if way < 0.5:
            word = "".join(rng.choice(syllables) for _ in range(rng.randint(2, 3)))
        elif way < 0.85:
            word = "".join(rng.choice(letters) for _ in range(rng.randint(3, 7)))
        else:
            word = rng.choice(parts) + rng.choice(parts)
        if word[0] in "aeiouy" or len(word) % 5 == 0:
            word = word.capitalize()
        # by spelling, so that the splits cannot share one
        if (sum(word.lower().encode()) % 4 == 0) == (split == "held-out"):
            found[word] = None
    return tuple(found)


class Pieces:
    """Token ids of short texts, encoded once each.

    Texts must begin and end where the tokenizer's own splitting would cut, as words with their leading space, numbers and
    signs do: then ids of pieces joined are the ids of the joined text.
    """

    __slots__ = ("_ids", "tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._ids: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        ids = self._ids.get(text)
        if ids is None:
            ids = self._ids[text] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def fill(self, texts: Sequence[str]) -> None:
        """Encodes many at once."""
        missing = [text for text in texts if text not in self._ids]
        for text, encoding in zip(missing, self.tokenizer.encode_batch(missing, add_special_tokens=False)):
            self._ids[text] = encoding.ids


@dataclass(frozen=True, slots=True)
class Name:
    """What a fact is about: "the blue door", "Maria Lund", "tovbil"."""

    words: tuple[str, ...]
    has_article: bool

    def text(self, capital: bool = False) -> str:
        """As it stands in a sentence, or at its start."""
        return " ".join((("The" if capital else "the"), *self.words) if self.has_article else self.words)


@dataclass(frozen=True, slots=True)
class Value:
    """An answer: texts of its pieces, joined without space; `opening` is the piece that follows a space."""

    text: str
    pieces: tuple[str, ...]  # of " text" but for a lone space, which is a token of its own before a digit


def digits_value(text: str) -> Value:
    """Digits, points and capitals, cut as the tokenizer cuts them."""
    pieces: list[str] = []
    for char in text:
        if pieces and char.isalpha() and pieces[-1].isalpha():
            pieces[-1] += char
        else:
            pieces.append(char)
    return Value(text, tuple(pieces))


class Draws:
    """Random attributes, names and values of one split."""

    def __init__(self, pieces: Pieces, split: str) -> None:
        self.words = WORDS[split]
        self.made_up = made_up_words(split, 6000 if split == "train" else 1500)
        held_out = {word.lower() for field in WORDS["held-out"].__slots__ for name in getattr(WORDS["held-out"], field)
                    for word in name.split()}  # fmt: skip
        tokenizer = pieces.tokenizer
        # not the control tokens, which come last, nor those of the beginning, the end and padding
        spelled = [(index, tokenizer.decode([index])) for index in range(3, tokenizer.get_vocab_size(with_added_tokens=False))]
        spelled = [(index, text) for index, text in spelled if text.strip().lower() not in held_out]
        #: any token of text
        self.tokens = [index for index, text in spelled if not text.endswith("\n")]
        #: words of the corpus that are one token each; a test draws them from the same list, its combinations are new
        self.vocabulary = [text[1:] for _, text in spelled
                           if len(text) > 3 and text[0] == " " and text[1:].isalpha() and text.isascii()]  # fmt: skip
        self.vocabulary = self.vocabulary or list(self.words.nouns)
        #: words of the corpus, of any number of tokens, none held out: `meet` fills it; an examination's draws have none
        self.common: list[str] = []
        self._held_out = held_out
        pieces.fill([f" {word}" for word in self.made_up])
        pieces.fill(self.made_up)
        self._number_attributes = set(self.words.number_attributes)
        #: share of values that are words whatever the attribute: most pieces of them say nothing of the next
        self.words_share = 0.0

    def meet(self, text: str, least: int = 12) -> None:
        """Words of a text that come `least` times in it, to be part of names, attributes and values from now on."""
        counts = Counter(re.findall(r"(?<![A-Za-z'’-])[a-z]{3,11}(?![A-Za-z'’-])", text))
        self.common = sorted(word for word, times in counts.items() if times >= least and word not in self._held_out)

    def some(self, rng: random.Random, words: Sequence[str], count: int, share: float = 0.5) -> list[str]:
        """`count` words that differ: of the list, or, `share` of the times, of what the corpus has."""
        source = self.common if self.common and rng.random() < share else words
        return rng.sample(source, min(count, len(source)))

    def attribute(self, rng: random.Random) -> str:
        """Mostly of the lists; some are words that are no attribute at all."""
        way = rng.random()
        if way < (0.6 if self.common else 0.86):
            return rng.choice(self.words.attributes)
        if way < 0.8:
            return rng.choice(self.common or self.vocabulary)
        return rng.choice(self.vocabulary if way < 0.92 else self.made_up)

    def thing(self, rng: random.Random) -> Name:
        """The blue door."""
        return Name((*self.some(rng, self.words.adjectives, 1), *self.some(rng, self.words.nouns, 1)), True)

    def person(self, rng: random.Random) -> Name:
        """Maria Lund, or Maria alone."""
        (first,) = self.some(rng, self.words.first_names, 1, 0.3)
        (last,) = self.some(rng, self.words.last_names, 1, 0.4)
        first, last = (word[0].upper() + word[1:] for word in (first, last))
        return Name((first,) if rng.random() < 0.25 else (first, last), False)

    def odd(self, rng: random.Random) -> Name:
        """Made-up words, words out of place, numbers and codes, three words."""
        way = rng.random()
        words = self.words
        if way < 0.3:
            return Name((rng.choice(self.made_up),), False)
        if way < 0.46:
            return Name((rng.choice(words.nouns), rng.choice(self.made_up)), rng.random() < 0.5)
        if way < 0.62:
            return Name((rng.choice(self.vocabulary), rng.choice(self.vocabulary)), rng.random() < 0.7)
        if way < 0.74:
            return Name((rng.choice(words.adjectives), rng.choice(self.made_up)), True)
        if way < 0.84:
            number = rng.choice("ABCDEFGH") * (rng.random() < 0.3) + str(rng.randrange(1, 10 ** rng.randint(1, 3)))
            return Name((rng.choice(words.nouns), number), rng.random() < 0.2)
        if way < 0.92:
            return Name((rng.choice(words.adjectives), rng.choice(words.adjectives), rng.choice(words.nouns)), True)
        return Name((rng.choice(words.nouns),), True)

    def name(self, rng: random.Random) -> Name:
        """Any of these."""
        way = rng.random()
        return self.thing(rng) if way < 0.45 else self.person(rng) if way < 0.65 else self.odd(rng)

    def digits(self, rng: random.Random) -> Value:
        """2 to 6 digits, of which 4 most often; leading zeros are as likely as any."""
        count = rng.choice((2, 3, 3, 4, 4, 4, 4, 5, 5, 6))
        text = f"{rng.randrange(10**count):0{count}d}"
        way = rng.random()
        if way < 0.12:
            text = (
                f"{text[:-2] or 7}.{text[-2:]}" if way < 0.04
                else f"{rng.randrange(24)}:{rng.randrange(60):02d}" if way < 0.07
                else f"{rng.randrange(100, 1000)}-{text}" if way < 0.1
                else f"{int(text):,}"
            )  # fmt: skip
        return digits_value(text)

    def letters_and_digits(self, rng: random.Random) -> Value:
        """K7X42, AB-129."""
        letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
        text = rng.choice(letters) + (rng.choice(letters) if rng.random() < 0.4 else "")
        text += rng.choice(("", "", "-")) + str(rng.randrange(1, 10 ** rng.randint(1, 3)))
        return digits_value(text + (rng.choice(letters) + str(rng.randrange(100)) if rng.random() < 0.4 else ""))

    def word(self, rng: random.Random) -> Value:
        """A word, now and then two or more."""
        way = rng.random()
        words = (
            self.words.values if way < 0.4 else self.made_up if way < 0.65
            else self.common if self.common and way < 0.85 else self.vocabulary
        )  # fmt: skip
        first = rng.choice(words)
        if rng.random() < 0.08:
            rest = [f" {rng.choice(words)}" for _ in range(rng.choice((1, 1, 1, 2, 3, 4)))]
            return Value(first + "".join(rest), (first, *rest))
        return Value(first, (first,))

    def value(self, rng: random.Random, attribute: str) -> Value:
        """What suits the attribute, and now and then what does not."""
        if self.words_share and rng.random() < self.words_share:
            return self.word(rng)
        way = rng.random()
        if attribute in self._number_attributes:
            return self.digits(rng) if way < 0.84 else self.word(rng) if way < 0.92 else self.letters_and_digits(rng)
        return self.word(rng) if way < 0.7 else self.digits(rng) if way < 0.9 else self.letters_and_digits(rng)
