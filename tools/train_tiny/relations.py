"""Facts in words of their own: where somebody lives, what a thing costs, what is mine; each with statements and questions."""

import random
from dataclasses import dataclass

from .names import Draws, Name, Value, digits_value
from .templates import Fact

PLACES = ("Paris", "London", "Rome", "Berlin", "Madrid", "Vienna", "Oslo", "Boston", "France", "Spain", "Norway", "China",
          "Egypt", "India", "Geneva", "Warsaw", "Naples", "Cairo", "York", "Bergen", "Chicago", "Texas", "Peru",
        "Japan")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Relation:
    """subject: person, thing, or nobody but the speaker.   value: place, person, word, number, year, time."""

    subject: str
    value: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]


RELATIONS = {
    "lives": Relation("person", "place", ("{N} lives in {v}.", "{N} moved to {v}.", "{N} has lived in {v} for years.",
        "The home of {n} is in {v}."), ("Where does {n} live?", "In which place does {n} live?", "Where is the home of {n}?")),
    "born": Relation("person", "place", ("{N} was born in {v}.", "{N} comes from {v}.", "{N} grew up in {v}."),
        ("Where was {n} born?", "Where does {n} come from?", "Where is {n} from?")),
    "born year": Relation("person", "year", ("{N} was born in {v}.", "In {v}, {n} was born."),
        ("When was {n} born?", "In which year was {n} born?")),
    "age": Relation("person", "number", ("{N} is {v} years old.", "{N} turned {v} last week."),
        ("How old is {n}?", "How many years old is {n}?")),
    "job": Relation("person", "word", ("{N} works as a {v}.", "{N} is a {v}.", "{N} became a {v}."),
        ("What does {n} do?", "What is the work of {n}?", "What does {n} work as?")),
    "likes": Relation("person", "word", ("{N} likes {v}.", "{N} loves {v} more than anything.", "What {n} likes is {v}."),
        ("What does {n} like?", "What does {n} love?", "Tell me what {n} likes.")),
    "eats": Relation("person", "word", ("{N} eats {v} every day.", "{N} had {v} for dinner."),
        ("What does {n} eat?", "What did {n} eat?", "What did {n} have for dinner?")),
    "friend": Relation("person", "person", ("{N} is a friend of {v}.", "{N} met {v} at school.",
        "The best friend of {n} is {v}."),
        ("Who is a friend of {n}?", "Who is the friend of {n}?", "Who did {n} meet?")),
    "married": Relation("person", "person", ("{N} is married to {v}.", "{N} married {v}."),
        ("Who is {n} married to?", "Whom did {n} marry?", "Who did {n} marry?")),
    "works with": Relation("person", "person", ("{N} works with {v}.", "{N} and {v} work together."),
        ("Who does {n} work with?", "With whom does {n} work?")),
    "plays": Relation("person", "word", ("{N} plays the {v}.", "{N} learned to play the {v}."),
        ("What does {n} play?", "What did {n} learn to play?")),
    "bought": Relation("person", "word", ("{N} bought a {v}.", "Yesterday {n} bought a {v}."),
        ("What did {n} buy?", "What has {n} bought?")),
    "lost": Relation("person", "word", ("{N} lost a {v}.", "{N} has lost the {v}."),
        ("What did {n} lose?", "What has {n} lost?")),
    "called": Relation("thing", "word", ("{N} is called {v}.", "They call {n} {v}.", "People call {n} {v}."),
        ("What is {n} called?", "How is {n} called?", "What do people call {n}?")),
    "costs": Relation("thing", "number", ("{N} costs {v} dollars.", "{N} was sold for {v} pounds.",
        "You can have {n} for {v} euros."),
        ("How much is {n}?", "How much does {n} cost?", "What does {n} cost?")),
    "weighs": Relation("thing", "number", ("{N} weighs {v} kilos.", "{N} has a weight of {v} pounds."),
        ("How heavy is {n}?", "How much does {n} weigh?", "What does {n} weigh?")),
    "high": Relation("thing", "number", ("{N} is {v} feet high.", "{N} is {v} metres high."),
        ("How high is {n}?", "How tall is {n}?")),
    "built": Relation("thing", "year", ("{N} was built in {v}.", "{N} was made in {v}.", "In {v} they built {n}."),
        ("When was {n} built?", "When was {n} made?", "In which year was {n} built?")),
    "kept": Relation("thing", "word", ("{N} is kept in the {v}.", "{N} lies in the {v}.", "You will find {n} in the {v}.",
        "Somebody put {n} into the {v}."), ("Where is {n}?", "Where is {n} kept?", "Where can I find {n}?")),
    "stands": Relation("thing", "place", ("{N} stands in {v}.", "{N} is in {v}.", "They sent {n} to {v}."),
        ("Where is {n}?", "Where does {n} stand?", "Where did they send {n}?")),
    "belongs": Relation("thing", "person", ("{N} is owned by {v}.", "The owner of {n} is {v}.", "{v} owns {n}."),
        ("Who owns {n}?", "Who is the owner of {n}?", "Whose is {n}?")),
    "found": Relation("thing", "person", ("{v} found {n}.", "{N} was found by {v}.", "It was {v} who found {n}."),
        ("Who found {n}?", "By whom was {n} found?")),
    "made of": Relation("thing", "word", ("{N} is made of {v}.", "They made {n} of {v}."),
        ("What is {n} made of?", "Of what is {n} made?")),
    "holds": Relation("thing", "word", ("{N} is full of {v}.", "In {n} there is {v}.", "{N} contains {v}."),
        ("What is in {n}?", "What does {n} contain?", "What is {n} full of?")),
    "opens": Relation("thing", "number", ("{N} opens with {v}.", "To open {n}, type {v}.", "Use {v} to open {n}."),
        ("What opens {n}?", "How do I open {n}?", "What must I type to open {n}?")),
    "leaves": Relation("thing", "time", ("{N} leaves at {v}.", "{N} opens at {v}.", "{N} closes at {v}."),
        ("At what time is it for {n}?", "When is the time of {n}?", "Which time was told for {n}?")),
    "my": Relation("nobody", "any", ("My {a} is {v}.", "My {a} is {v}, by the way.", "I have the {a} {v}.", "{v} is my {a}."),
        ("What is my {a}?", "What's my {a}?", "Do you remember my {a}?", "Tell me my {a}.", "Which {a} do I have?")),
    "our": Relation("nobody", "any", ("Our {a} is {v}.", "We have the {a} {v}."), ("What is our {a}?", "Tell me our {a}.")),
    "I live": Relation("nobody", "place", ("I live in {v}.", "I am from {v}."), ("Where do I live?", "Where am I from?")),
    "I like": Relation("nobody", "word", ("I like {v}.", "I love {v}."), ("What do I like?", "What did I say I like?")),
    "I am": Relation("nobody", "person", ("I am {v}.", "My name is {v}.", "Call me {v}."),
        ("Who am I?", "What is my name?", "What's my name?")),
}  # fmt: skip


def draw_related(rng: random.Random, draws: Draws, count: int) -> list[Fact]:
    """Up to `count` facts whose relation and subject differ."""
    few = rng.sample(list(RELATIONS), rng.randint(1, 8)) if rng.random() < 0.5 else list(RELATIONS)
    found: dict[tuple[str, str, Name], Fact] = {}
    for _ in range(2 * count):
        if len(found) == count:
            break
        key = rng.choice(few)
        relation = RELATIONS[key]
        name = draws.person(rng) if relation.subject == "person" else draws.thing(rng)
        if relation.subject == "nobody":
            name = Name((), False)
        attribute = draws.attribute(rng) if relation.value == "any" else ""
        # two questions may mean either of two relations: one for each subject
        group = attribute or (relation.subject if relation.subject != "nobody" else key)
        found.setdefault((group, attribute, name), Fact(attribute, name, _value(rng, draws, relation.value, attribute), key))
    return list(found.values())


def _value(rng: random.Random, draws: Draws, kind: str, attribute: str) -> Value:
    if kind == "any":
        return draws.value(rng, attribute)
    if kind == "place":
        word = rng.choice(PLACES) if rng.random() < 0.6 else rng.choice(draws.made_up).capitalize()
        return Value(word, (word,))
    if kind == "person":
        words = draws.person(rng).words
        return Value(" ".join(words), (words[0], *(f" {word}" for word in words[1:])))
    if kind == "number":
        return digits_value(str(rng.randrange(1, 10 ** rng.randint(1, 4))))
    if kind == "year":
        return digits_value(str(rng.randrange(1100, 2030)))
    if kind == "time":
        return digits_value(f"{rng.randrange(24)}:{rng.randrange(60):02d}")
    word = rng.choice(draws.words.values) if rng.random() < 0.3 else rng.choice(draws.common or draws.vocabulary)
    word = word.lower()
    return Value(word, (word,))
