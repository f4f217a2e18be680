"""Synthetic texts in letters, for a tokenizer's training."""

import random

from .names import LANGUAGES, WORDS, Name, Value, digits_value, language_words
from .small import ORDERS, POSITIONS
from .templates import COMPLETIONS, FRAMES, QUESTIONS, QUESTIONS_OF_KIND, STATEMENTS, UPDATES, Fact, fact_text


def sample(rng: random.Random, split: str) -> str:
    """A fact told and asked for, or a question of another kind."""
    words = WORDS[split]
    if rng.random() < 0.12:
        kinds = rng.sample(words.kinds, 3)
        question = rng.choice(list(QUESTIONS_OF_KIND.values())).format(x=kinds[0], y=kinds[1], part=rng.choice(POSITIONS))
        language = rng.choice(list(LANGUAGES))
        listed = " ".join(rng.sample(language_words(language, "train"), 3)) if rng.random() < 0.3 else ", ".join(kinds)
        answer = rng.choice((kinds[0], language, rng.choice(rng.choice(ORDERS))))
        return f"Words: {listed}.\nQuestion: {question}\nAnswer: {answer}\n"
    if rng.random() < 0.7:
        name = Name((rng.choice(words.adjectives), rng.choice(words.nouns)), True)
    else:
        name = Name((rng.choice(words.first_names), rng.choice(words.last_names)), False)
    text = rng.choice(words.values)
    value = Value(text, (text,)) if rng.random() < 0.5 else digits_value(str(rng.randrange(10 ** rng.randint(2, 6))))
    fact = Fact(rng.choice(words.attributes), name, value)
    told = fact_text(rng.choice(STATEMENTS[split] + (UPDATES[split] + COMPLETIONS[split] if rng.random() < 0.2 else ())), fact)
    asked = rng.choice(FRAMES[split]).replace("{q}", rng.choice(QUESTIONS[split]))
    return f"{told}\n{fact_text(asked, fact)}"
