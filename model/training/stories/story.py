"""A story in the making: the cast, the world, and the sentences so far. It knows no plot.

Sentences are forms with roles: `{a}` is a name, `{a.he}` a pronoun, `{t}` "the red ball" and `{t.a}` "a red ball". In
every form, `{a}`, `{b}` and `{c}` are the children, `{p}` is the place, and `{at}` the place with its preposition.
"""

import random
from collections.abc import Mapping, Sequence
from string import Formatter

from model.training.stories import words
from model.training.stories.world import Being, Thing, World, female, male

HAPPY = ("happy", "glad", "pleased", "cheerful")
SAD = ("sad", "upset", "unhappy")


class Story:
    """`hero`, `friend` and `third` are children. All choices are drawn from `rng`.

    `roles` are those of the present plot, besides the roles that every form may have.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.world = World()
        self.paragraphs: list[list[str]] = [[]]
        children = [female(name, "girl") for name in words.GIRLS] + [male(name, "boy") for name in words.BOYS]
        self.hero, self.friend, self.third = rng.sample(children, 3)
        make = rng.choice((female, male))
        species = rng.choice(words.ANIMALS)
        self.animal = make(f"the {rng.choice(('little', 'small', 'young', 'old'))} {species}", species)
        self.place = rng.choice(list(words.PLACES))
        self.roles: Mapping[str, object] = {}
        self._nouns: set[str] = set()

    @property
    def at(self) -> str:
        """The place with its preposition, such as "in the forest"."""
        return f"{words.PLACES[self.place]} the {self.place}"

    def new_thing(self, nouns: Sequence[str] = (*words.THINGS, *words.FRAGILE)) -> Thing:
        """A thing whose noun does not belong to another thing of the story."""
        noun = self.rng.choice([noun for noun in nouns if noun not in self._nouns])
        self._nouns.add(noun)
        return Thing(noun, self.rng.choice((*words.COLOURS, *words.QUALITIES)))

    def new_adult(self, child: Being) -> Being:
        """Somebody of the child's family."""
        if self.rng.random() < 0.5:
            return female(f"{child}'s {self.rng.choice(words.WOMEN)}", "woman")
        return male(f"{child}'s {self.rng.choice(words.MEN)}", "man")

    @property
    def text(self) -> str:
        return "\n\n".join(" ".join(sentences) for sentences in self.paragraphs if sentences)

    def paragraph(self) -> None:
        self.paragraphs.append([])

    def _fill(self, form: str, roles: Mapping[str, object]) -> str:
        """The form with its roles. Everybody in it must be part of the story already."""
        own = {"a": self.hero, "b": self.friend, "c": self.third, "p": self.place, "at": self.at}
        known = {**own, **self.roles, **roles}
        for _, field, _, _ in Formatter().parse(form):
            role = known[field.split(".")[0]] if field else None
            assert not isinstance(role, Being) or role in self.world.known, f"{role} was not introduced"
        return form.format(**known)

    def say(self, *forms: str, **roles: object) -> None:
        """Add one of the forms."""
        sentence = self._fill(self.rng.choice(forms), roles)
        self.paragraphs[-1].append(sentence[0].upper() + sentence[1:])

    def perhaps(self, *forms: str, **roles: object) -> None:
        """Add one of the forms, or none."""
        if self.rng.random() < 0.5:
            self.say(*forms, **roles)

    def speak(self, speaker: Being, *lines: str, **roles: object) -> None:
        """Let somebody say one of the lines."""
        line = self._fill(self.rng.choice(lines), roles)
        line = line[0].upper() + line[1:]
        verb = (
            "asked"
            if line.endswith("?")
            else self.rng.choice(("said", "said", "said", "cried" if line.endswith("!") else "said"))
        )
        quoted = line[:-1] + "," if line.endswith(".") else line
        self.say('"{q}" {v} {s}.', '"{q}" {s} {v}.', '{s} {v}, "{l}"', q=quoted, v=verb, s=speaker, l=line)

    def meet(self, being: Being, *forms: str, **roles: object) -> None:
        """Introduce somebody, who has the role `new` in the forms."""
        self.world.meet(being)
        self.say(*forms, new=being, **roles)

    def feel(self, being: Being, feelings: Sequence[str], cause: str, **roles: object) -> None:
        """Say how somebody feels, and why. `cause` is a clause."""
        feeling, reason = self.rng.choice(feelings), self._fill(cause, roles)
        self.say(
            "{a} was {f} because {c}.",
            "{a} felt {f}, because {c}.",
            "{a} was very {f} because {c}.",
            a=being,
            f=feeling,
            c=reason,
        )

    def give(self, giver: Being, taker: Being, thing: Thing) -> None:
        self.world.give(giver, taker, thing)
        self.say(
            "{a} gave {t} to {b}.",
            "{a} handed {t} to {b}.",
            "{a} smiled and gave {t} to {b}.",
            "Then {a} gave {b} {t}.",
            a=giver,
            b=taker,
            t=thing,
        )

    def own(self, being: Being, thing: Thing) -> None:
        self.world.take(being, thing)
        self.say(
            "{a} had {t.a}.",
            "{a} had {t.a} that {a.he} loved very much.",
            "{a} always carried {t.a}.",
            "The best thing {a} had was {t.a}.",
            "{a} got {t.a} for {a.his} birthday.",
            a=being,
            t=thing,
        )
