"""Wordings: how a fact is stated, how it is asked for and answered, and how the two are compiled to token ids.

Slots: {a} attribute, {n} name, {N} name at the start of a sentence, {v} value, {q} question.
"""

import re
from dataclasses import dataclass

from .names import EOS, Name, Pieces, Value

STATEMENTS = {
    "train": (
        "The {a} of {n} is {v}.",
        "{N}'s {a} is {v}.",
        "{N} has the {a} {v}.",
        "The {a} for {n} was set to {v}.",
        "Remember that the {a} of {n} is {v}.",
        "Note: the {a} of {n} is {v}.",
        "{v} is the {a} of {n}.",
        "Please write down: {n}, {a}, {v}.",
        "{N}: {a} {v}.",
        "We were told that the {a} of {n} was {v}.",
        "As for {n}, the {a} is {v}.",
        "It is known that {v} is the {a} of {n}.",
        "One of the special magic {a} values for {n} is: {v}.",
        "I looked at {n}; the {a} was {v}.",
        "| {n} | {a} | {v} |",
        "If anyone asks for the {a} of {n}, say {v}.",
        "{N}: {a} = {v}.",
        "The {a} that belongs to {n} is {v}.",
        "On the list, {n} stands with the {a} {v}.",
        '{{"name": "{n}", "{a}": "{v}"}}',
        "The {a} of {n} is \"{v}\".",
        "My friend said that {n} has {v} as the {a}.",
        "The {a} of {n} has always been {v}.",
        "In this story the {a} of {n} is {v}.",
        "{N} got the {a} {v}.",
        "{N} was given the {a} {v}.",
        "They gave {n} the {a} {v}.",
        "For {n}, use the {a} {v}.",
        "Here is the {a} of {n}: {v}.",
        "The {a} for {n}: {v}.",
        "Keep in mind that {n} has the {a} {v}.",
        "You should know that the {a} of {n} is {v}.",
        "The records show {v} as the {a} of {n}.",
        "The book lists {n} with the {a} {v}.",
        "A note said that the {a} of {n} would be {v}.",
        "It was agreed that the {a} of {n} should be {v}.",
        "Somebody wrote {v} next to {n} as the {a}.",
        "With {n} comes the {a} {v}.",
        "{N} is known for the {a} {v}.",
        "The doctor told us that the {a} of {n} is {v}.",
        "What we know of {n} is the {a}: {v}.",
        "Concerning {n}: the {a} is {v}.",
        "By the way, {n} has {v} for a {a}.",
        "The {a} of {n} turned out to be {v}.",
        "Let the {a} of {n} be {v}.",
        "{v} was chosen as the {a} of {n}.",
        "They chose {v} as the {a} of {n}.",
        "Ask {n} for the {a}, and you hear {v}.",
        "There is {n}, and the {a} is {v}.",
        "When we saw {n}, the {a} was still {v}.",
        "- {n}: {a} {v}",
        "{N}, {a} {v}.",
        "Take {v} as the {a} of {n}.",
        "It was {v}, and nothing else, that they wrote down as the {a} of {n}.",
        "{v}: the {a} of {n}.",
        "Write {v} for the {a} of {n}.",
        "She answered {v} when they asked for the {a} of {n}.",
        "{v}, the {a} of {n}, is not known to many.",
        "We use {v}, which is the {a} of {n}.",
        "Nobody but {n} has {v} for its {a}.",
        "Whoever looks for the {a} of {n} will find {v}.",
        "People often forget that {v} is the {a} of {n}.",
        "According to the letter, {n} has the {a} {v}.",
        "Under {n} one reads the {a} {v}.",
        "The {a} that was noted for {n} is {v}.",
        "It says here that {n} has the {a} {v}.",
    ),
    "held-out": (
        "Do not forget: {n} goes with the {a} {v}.",
        "You will need {v}, the {a} of {n}.",
        "They say the {a} of {n} equals {v}.",
        "According to the label, the {a} of {n} reads {v}.",
        "Among other things, {n} got {v} as its {a}.",
        "Everyone here knows the {a} of {n}: {v}.",
    ),
}  # fmt: skip
#: the same fact told again with another value; the last one counts
UPDATES = {
    "train": (
        "The {a} of {n} is now {v}.",
        "Now the {a} of {n} is {v}.",
        "The {a} of {n} was changed to {v}.",
        "{N} has a new {a}: {v}.",
    ),
    "held-out": ("From today on the {a} of {n} is {v}.", "Correction: the {a} of {n} is {v}."),
}
QUESTIONS = {
    "train": (
        "What is the {a} of {n}?",
        "What's the {a} of {n}?",
        "What is {n}'s {a}?",
        "Which {a} does {n} have?",
        "What {a} was given for {n}?",
        "Tell me the {a} of {n}.",
        "Do you remember the {a} of {n}?",
        "Give the {a} of {n}.",
        "Find the {a} of {n} in the text.",
        "What is the special magic {a} for {n} mentioned in the text?",
        "The {a} of {n}?",
        "According to the text, what is the {a} of {n}?",
        "Can you look up the {a} of {n}?",
        "What was the {a} of {n}?",
        "Please tell me the {a} of {n}.",
        "I want to know the {a} of {n}.",
        "State the {a} of {n}.",
        "Name the {a} of {n}.",
        "Which {a} is given for {n}?",
        "What {a} does {n} have?",
        "What {a} do we know for {n}?",
        "Do you know what the {a} of {n} is?",
        "Can you tell me what the {a} of {n} was?",
        "Write the {a} of {n}.",
        "Who knows the {a} of {n}?",
        "What about the {a} of {n}?",
        "And the {a} of {n}?",
        "For {n}, what is the {a}?",
        "About {n}: what is the {a}?",
        "Look for the {a} of {n}.",
        "Show me {n}'s {a}.",
        "Please give {n}'s {a}.",
        "Remind me of the {a} of {n}.",
        "I need the {a} of {n}.",
        "I would like to hear the {a} of {n}.",
        "Help me find the {a} of {n}.",
        "What did the text say about the {a} of {n}?",
        "What is written as the {a} of {n}?",
        "Under {n}, which {a} is listed?",
        "Tell us which {a} {n} had.",
        "What is the value of the {a} of {n}?",
        "Which value was noted as the {a} of {n}?",
        "The text names the {a} of {n}. What is it?",
        "There was a {a} for {n}. Which one?",
        "Let me know the {a} of {n}.",
        "{N}: what is the {a}?",
        "{N}'s {a}?",
        "{N} has which {a}?",
        "I did not hear the {a} of {n}. Which is it?",
        "Would you give me the {a} of {n}?",
        "They asked about the {a} of {n}. What should I say?",
        "The {a} that {n} had?",
        "Look at {n} and name its {a}.",
        "What does {n} have as its {a}?",
        "Tell me the {a} {n} has.",
        "Give me the {a} which {n} got.",
        "Think of {n}. Which {a} was it?",
        "Is there a {a} for {n}? Name it.",
        "If I ask for {n}, which {a} do you find?",
        "Write only the {a} of {n}.",
        "{N}: which {a}?",
        "Check the {a} of {n} for me.",
        "Read out what {n} has as {a}.",
    ),
    "held-out": (
        "Could you repeat the {a} of {n}?",
        "I forgot the {a} of {n}. What was it?",
        "Which {a} belongs to {n}?",
        "Say the {a} that {n} has.",
        "What did we say the {a} of {n} was?",
    ),
}
#: of a fact about nothing but itself: the secret code
BARE_STATEMENTS = {
    "train": ("The {a} is {v}.", "Remember that the {a} is {v}.", "Note: the {a} is {v}.", "The {a} was set to {v}.",
              "{v} is the {a}.", "It is known that the {a} is {v}.", "We were told that the {a} was {v}."),
    "held-out": ("Do not forget the {a}: {v}.", "They say the {a} equals {v}."),
}  # fmt: skip
BARE_UPDATES = {"train": ("The {a} is now {v}.", "Now the {a} is {v}."), "held-out": ("From today on the {a} is {v}.",)}
BARE_QUESTIONS = {
    "train": ("What is the {a}?", "What's the {a}?", "Tell me the {a}.", "Do you remember the {a}?", "Find the {a} in the text.",
              "According to the text, what is the {a}?", "What was the {a}?"),
    "held-out": ("Could you repeat the {a}?", "I forgot the {a}. What was it?"),
}  # fmt: skip
BARE_COMPLETIONS = {"train": ("The {a} is {v}.", "So the {a} is {v}."), "held-out": ("Once more, the {a} was {v}.",)}
#: two lists of labels, any of the first before a question and any of the second before its answer
_ASKING = (
    "Question", "Query", "Request", "Prompt", "Input", "Human", "User", "Client", "Visitor", "Student", "Host", "Guest",
    "Reporter", "Child", "Mother", "Judge", "Me", "Anna", "Ben", "Item", "Task", "Exercise", "Riddle", "Quiz", "Test",
    "Part", "First", "Clerk", "Customer", "Speaker", "Q", "A", "Then", "King", "Son", "Stranger", "Call", "In", "Left",
    "Now",
)  # fmt: skip
_ANSWERING = (
    "Answer", "Response", "Result", "Output", "Bot", "Assistant", "AI", "Model", "Guide", "Clerk", "Master", "Witness",
    "You", "Ben", "Kate", "Value", "Found", "Done", "Second", "Expert", "Helper", "Seller", "Speaker", "A", "B", "Text",
    "Queen", "Father", "Friend", "Return", "Out", "Right", "Final answer", "Correct answer", "It is", "My answer",
    "The answer",
)  # fmt: skip
_LABELLED = tuple(
    f"{asking}{number}: {{q}}{between}{answering}: {{v}}\n"
    for index, asking in enumerate(_ASKING)
    for answering in (_ANSWERING[(step * index + first) % len(_ANSWERING)] for step, first in ((1, 0), (7, 3), (11, 5)))
    for number, between in ((("", "\n"), (" 1", "\n"), ("", " "), ("", "\n"))[index % 4],)
)
#: around a question; the first is the main one. Each ends where its answer ends, with one sign that says so.
FRAMES = {
    "train": (
        "Question: {q}\nAnswer: {v}\n",
        "Q: {q}\nA: {v}\n",
        "User: {q}\nAssistant: {v}\n",
        "{q} {v}\n",
        "{q} It is {v}.\n",
        "{q}\nAnswer: {v}\n",
        "{q} Answer: {v}\n",
        "{q} The answer is {v}.\n",
        "{q}\nThe answer: {v}\n",
        "Here is a question. {q}\nAnswer: {v}\n",
        "One more question. {q} Answer: {v}\n",
        "Please answer: {q}\nAnswer: {v}\n",
        "Read the text again. {q}\nAnswer: {v}\n",
        "Answer the question. {q}\nAnswer: {v}\n",
        "He asked: {q} She said: {v}.\n",
        "They ask: {q} We say: {v}.\n",
        "Look it up. {q} {v}\n",
        "{q}\n- {v}\n",
        *_LABELLED,
    ),
    "held-out": (
        "Problem: {q}\nSolution: {v}\n",
        "Ask: {q}\nReply: {v}\n",
        "Teacher: {q}\nPupil: {v}\n",
        "Now answer this. {q}\nAnswer: {v}\n",
    ),
}
#: an answer without a question: the sentence that states the fact, said again
COMPLETIONS = {
    "train": (
        "The {a} of {n} is {v}.",
        "So the {a} of {n} is {v}.",
        "{N}'s {a} is {v}.",
        "As we know, the {a} of {n} is {v}.",
        "Remember, the {a} of {n} is {v}.",
    ),
    "held-out": ("Once more, the {a} of {n} was {v}.", "Again, {n} has the {a} {v}."),
}

#: text of a markers' turn, used if the tokenizer has them
USER_MARKER, ASSISTANT_MARKER = "<｜User｜>", "<｜Assistant｜>"
END = "\0"  # stands for the token that ends a document

QUESTIONS_OF_KIND = {
    "majority": "Which came more often, {x} or {y}?",
    "most": "Which word came most often?",
    "language": "Which language was the {part} part in?",
    "text": "What kind of text was the {part} part?",
    "source": "Where was the {part} part from?",
    "count": "How many times does the word {x} come?",
    "item": "What was the {part} word?",
}


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a template: ids as they are, or a slot."""

    ids: tuple[int, ...]
    slot: str  # "" for ids
    is_spaced: bool
    is_capital: bool = False


Template = tuple[Part, ...]
_SLOT = re.compile(r"( ?)\{([anNv])\}")
#: where the tokenizer cuts: markers, endings such as 's, words, signs, digits, spaces
_PIECE = re.compile(r"<[^\s<>]+>|'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?(?:(?!<[^\s<>]+>)[^\sA-Za-z\d])+|\d|\s+(?!\S)|\s+")


def compile_template(text: str, pieces: Pieces, is_spaced: bool, by_word: bool = False) -> Template:
    """A template as parts; `is_spaced`: it follows a sentence, after a space.

    by_word  its words are encoded one by one, where the tokenizer would cut: for texts that are used once.
    """
    parts: list[Part] = []
    text = (" " + text if is_spaced else text).replace("{{", "\1").replace("}}", "\2")
    start = 0

    def literal(piece: str) -> None:
        if piece:
            # a line's end is a token of its own wherever a text goes on after it
            for line in re.split(r"([\n\0])", piece.replace("\1", "{").replace("\2", "}")):
                if line and by_word:
                    ids = tuple(token for word in _PIECE.findall(line) for token in pieces(word))
                    parts.append(Part((EOS,) if line == END else ids, "", False))
                elif line:
                    parts.append(Part((EOS,) if line == END else tuple(pieces(line)), "", False))

    for match in _SLOT.finditer(text):
        literal(text[start : match.start()])
        slot = match.group(2)
        parts.append(Part((), slot.lower(), bool(match.group(1)), slot == "N"))
        start = match.end()
    literal(text[start:])
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class Fact:
    """An attribute of a name, and its value."""

    attribute: str
    name: Name
    value: Value
    relation: str = ""  # of relations.py; none: an attribute's


def attribute_ids(pieces: Pieces, attribute: str, is_spaced: bool) -> list[int]:
    """Ids of an attribute of one word or more."""
    first, *rest = attribute.split(" ")
    ids = list(pieces(f" {first}" if is_spaced else first))
    for word in rest:
        ids += pieces(f" {word}")
    return ids


def name_ids(pieces: Pieces, name: Name, is_spaced: bool, is_capital: bool) -> list[int]:
    """Ids of a name."""
    first, *rest = ("The" if is_capital else "the", *name.words) if name.has_article else name.words
    ids = list(pieces(f" {first}" if is_spaced else first))
    for word in rest:
        ids += pieces(f" {word}")
    return ids


def value_ids(pieces: Pieces, value: Value, is_spaced: bool) -> tuple[list[int], int]:
    """Ids of a value, and how many of the first say nothing of it (1: a space before a digit)."""
    first, *rest = value.pieces
    silent = 0
    if is_spaced and first[0].isdigit():
        ids = pieces(" ") + pieces(first)
        silent = 1
    else:
        ids = list(pieces(f" {first}" if is_spaced else first))
    for piece in rest:
        ids += pieces(piece)
    return ids, silent


def fact_text(template: str, fact: Fact) -> str:
    """The same in letters."""
    text = template.replace("{{", "\1").replace("}}", "\2")
    text = text.replace("{a}", fact.attribute).replace("{n}", fact.name.text()).replace("{N}", fact.name.text(True))
    return text.replace("{v}", fact.value.text).replace("\1", "{").replace("\2", "}")
