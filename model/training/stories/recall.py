"""Texts that can only be continued by copying: repeated lists, songs with refrains, and who has which thing."""

import random

from model.training.stories import words

THINGS = (*words.THINGS, *words.FRAGILE)


def _list(rng: random.Random) -> str:
    items = rng.sample(rng.choice((words.GIRLS + words.BOYS, THINGS, words.ANIMALS)), rng.randint(4, 12))
    line = ", ".join(items)
    separator = rng.choice(("\n", ". ", ", "))
    return separator.join([line] * rng.randint(2, 4))


def _song(rng: random.Random) -> str:
    name, animal, place = (
        rng.choice(words.GIRLS + words.BOYS),
        rng.choice(words.ANIMALS),
        rng.choice(list(words.PLACES)),
    )
    first, second = rng.sample(words.COLOURS + words.QUALITIES, 2)
    sound = " ".join(
        rng.choice(("la", "tra", "hey", "ho", "dum", "ding", "dong", "hum")) for _ in range(rng.randint(4, 8))
    )
    refrain = f"Oh {name}, oh {name}, the {first} {animal} goes to the {place},\n{sound}."
    verses = [
        f"The {second} {thing} is here, the {second} {thing} is there."
        for thing in rng.sample(THINGS, rng.randint(2, 4))
    ]
    return "\n\n".join(f"{verse}\n{refrain}" for verse in verses)


def _owners(rng: random.Random) -> str:
    count = rng.randint(3, 7)
    names, things = rng.sample(words.GIRLS + words.BOYS, count), rng.sample(THINGS, count)
    pairs = list(zip(names, things, strict=True))
    told = [f"{name} has {words.article(thing)}." for name, thing in pairs]
    rng.shuffle(pairs)
    asked = [
        rng.choice((f"Who has the {thing}? {name} has the {thing}.", f"And {name}? {name} has the {thing}."))
        for name, thing in pairs
    ]
    return " ".join(told) + "\n\n" + " ".join(asked)


def recall_text(rng: random.Random) -> str:
    return rng.choice((_list, _song, _owners))(rng)
