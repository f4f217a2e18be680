"""Very simple stories: a few people, one place after another, things that are found, lost and given; plain grammar.

Written word by word from ids that were looked up once.
"""

import random
import re

from .drafts import Draft, Writer
from .names import EOS, Name, Value
from .templates import ASSISTANT_MARKER, USER_MARKER, Fact

GIRLS = ("Anna", "Eva", "Clara", "Emma", "Grace", "Kate", "Maria", "Nora", "Rosa", "Vera", "Alice", "Mary", "Lucy", "Ella")
BOYS = ("Ben", "David", "Frank", "Henry", "Jack", "Leo", "Oscar", "Paul", "Sam", "Tom", "Will", "Peter", "John", "George", "Max")
BEASTS = ("dog", "cat", "bird", "horse", "sheep", "fox", "bear", "rabbit", "mouse", "fish")
PETS = ("dog", "little dog", "cat", "white cat", "horse", "pony", "tame bird", "donkey")
PLACES = ("the garden", "the school", "the farm", "the shop", "the river", "the lake", "the hill", "the church", "the market",
          "the old tower", "the kitchen", "the park", "the field", "the bridge", "the station")  # fmt: skip
THINGS = ("a red ball", "an old key", "a small box", "a warm coat", "a blue cup", "a letter", "a book", "a little boat", "a hat",
          "a round stone", "a silver bell", "a map", "a loaf of bread", "a lamp", "a basket of apples", "a picture")  # fmt: skip
MOODS = ("happy", "sad", "tired", "hungry", "angry", "proud", "afraid", "quiet", "surprised", "lonely")
KIN = ("friend", "brother", "sister", "neighbour", "teacher", "cousin", "grandmother", "father", "mother", "uncle")
TIMES = ("In the morning", "In the afternoon", "In the evening", "The next day", "After lunch", "Later", "Soon", "Then")
WEATHER = ("The sun was shining", "It was raining", "It was cold", "The wind was strong", "It was a warm day", "Snow was falling")
OPENINGS = (
    "Once upon a time there was a {who} named {A}. {He} lived near {place} with {his} {kin}.",
    "{A} was a {who} who lived in a small house near {place}.",
    "There was once a {who} called {A}. {He} had a {pet}, and they went everywhere together.",
    "This is a story about {A} and {B}. They were good friends.",
    "{A} and {B} lived in the same village, not far from {place}.",
)
#: {t} is what A has, if anything; each line keeps to it
EVENTS = (
    "{time} {A} went to {place}.",
    "{time} {A} and {B} walked to {place} together.",
    "{weather}, so {A} stayed near {place} for a while.",
    "{A} felt {mood}, but {he} did not say so.",
    '"Where are you going?" asked {B}. "I am going to {place}," said {A}.',
    '"I am {mood}," said {B}. "Come with me," said {A}, and they went to {place}.',
    "{A} saw a {beast} by {place}. The {beast} looked at {him} and ran away.",
    "{He} wanted to see {place}, because {his} {kin} had told {him} about it.",
    "{B} was waiting at {place}. {A} was very glad to see {B}.",
    "They sat down and talked for a long time.",
    "{A} heard a noise. It was only a {beast}.",
    "{A} was {mood}, and {B} was {mood2}.",
    "When {he} came to {place}, nobody was there.",
    "{He} thought about it all day, and at night {he} could not sleep.",
    "{A} asked {his} {kin} for help, and {his} {kin} smiled.",
)
FINDS = ("{A} found {t} near {place}.", "{A} bought {t} at {place}.", '"Look," said {A}, "I have found {t}!"',
         "{His} {kin} gave {A} {t}.")  # fmt: skip
KEEPS = ("{A} put {thet} in {his} bag.", "{A} showed {thet} to {B}.", "{He} looked at {thet} again and again.",
         '"What a nice thing," said {B} when {A} took out {thet}.')  # fmt: skip
LOSES = ("{A} gave {thet} to {B}, and {B} was very happy.", "{A} lost {thet} on the way to {place}.",
         "{A} left {thet} at {place} and went home.")  # fmt: skip
ENDINGS = (
    "In the end they all went home and had bread and soup.",
    "{A} was tired, and soon {he} was asleep.",
    "From that day on {A} and {B} were the best of friends.",
    '"Thank you," said {B}. "That was a good day," said {A}.',
    "And {A} never forgot what had happened at {place}.",
    "When {A} told {his} {kin} about it, everybody laughed.",
)
NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.", "It is late.")
WISHES = ("Tell me a story.", "Tell me a short story.", "Please tell me a story.", "Can you tell a story?", "Write a story.")
_WORDS = re.compile(r"\n| ?[A-Za-z]+| ?\d| ?[^\sA-Za-z\d]+")


class Stories:
    """Rows of stories, each followed by a question or two about it in a third of them."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer

    def row(self, rng: random.Random, room: int) -> Draft:
        """Stories until the row is full."""
        draft = Draft()
        pieces, weights = self.writer.pieces, self.writer.weights
        while len(draft) < room:
            text, asked = self.story(rng)
            as_chat = self.writer.has_markers and rng.random() < 0.35
            if as_chat:
                said = rng.choice(WISHES)
                thinks = ("<think>", "</think>") if rng.random() < 0.3 else ("</think>",)
                for part in (USER_MARKER, *_WORDS.findall(said), ASSISTANT_MARKER, *thinks):
                    draft.add(pieces(part), 0.0)
            for word in _WORDS.findall(text):
                draft.add(pieces(word), weights.text)
            if as_chat:
                draft.add([EOS], weights.text)
                continue
            draft.add(pieces("\n"), weights.text)
            if rng.random() < 0.35:
                for question, answer in asked[: rng.randint(1, 2)]:
                    fact = Fact("", Name((), False), Value(answer, tuple(_WORDS.findall(answer))))
                    draft.join(self.writer.sentence(f"Question: {question}\nAnswer: {{v}}\n", fact, False, True))
            draft.add([EOS], weights.text)
        return draft

    def tokens(self, rng: random.Random, count: int) -> list[int]:
        """Text that facts are written into beside the corpus: stories, the same few sentences on and on, words in no order."""
        ids: list[int] = []
        while len(ids) < count:
            way = rng.random()
            if way < 0.5:
                text = self.story(rng)[0]
            elif way < 0.8:
                text = " ".join(rng.sample(NOISE, rng.randint(3, len(NOISE))) * rng.randint(4, 20))
            else:
                words = (rng.choice(self.writer.draws.vocabulary) for _ in range(rng.randint(100, 400)))
                text = " ".join(word + "." * (rng.random() < 0.1) for word in words)
            for word in _WORDS.findall(text + "\n"):
                ids += self.writer.pieces(word)
        return ids[:count]

    def story(self, rng: random.Random) -> tuple[str, list[tuple[str, str]]]:
        """A story, and questions about it with their answers."""
        girl = rng.random() < 0.5
        one = rng.choice(GIRLS if girl else BOYS)
        two = rng.choice([name for name in GIRLS + BOYS if name != one])
        kin = rng.choice(KIN)
        words = {"A": one, "B": two, "who": "girl" if girl else "boy", "he": "she" if girl else "he", "kin": kin,
                 "his": "her" if girl else "his", "him": "her" if girl else "him", "beast": rng.choice(BEASTS),
                 "pet": rng.choice(PETS)}  # fmt: skip
        words["He"], words["His"] = words["he"].capitalize(), words["his"].capitalize()

        def say(text: str) -> str:
            moods = rng.sample(MOODS, 2)
            filled = text.format(**words, place=rng.choice(PLACES), mood=moods[0], mood2=moods[1], time=rng.choice(TIMES),
                                 weather=rng.choice(WEATHER), t=words.get("thing", ""), thet=words.get("the", ""))  # fmt: skip
            return filled[0].upper() + filled[1:]

        events = rng.sample(EVENTS, len(EVENTS))
        paragraphs: list[list[str]] = [[say(rng.choice(OPENINGS))]]
        asked: list[tuple[str, str]] = []
        for _ in range(rng.randint(1, 4)):
            lines: list[str] = []
            if "thing" not in words:
                words["thing"] = rng.choice(THINGS)
                words["the"] = "the " + words["thing"].split(" ", 1)[1]
                lines.append(say(rng.choice(FINDS)))
                if not asked:
                    asked.append((f"What did {one} get first?", words["thing"]))
                    asked.append((f"Who got {words['thing']}?", one))
            lines += [say(events.pop()) for _ in range(rng.randint(1, 3))]
            if rng.random() < 0.5:
                lines.append(say(rng.choice(KEEPS)))
            if rng.random() < 0.5:
                lines.append(say(rng.choice(LOSES)))
                del words["thing"], words["the"]
            paragraphs.append(lines)
        paragraphs[-1].append(say(rng.choice(ENDINGS)))
        rng.shuffle(asked)
        return "\n\n".join(" ".join(lines) for lines in paragraphs), asked
