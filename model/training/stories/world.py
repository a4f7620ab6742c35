"""The state of a story: people, animals and things, and who holds each thing.

An action that the state forbids, such as giving away a thing that one does not hold, raises `AssertionError`.
"""

from dataclasses import dataclass, field

from model.training.stories.words import article


@dataclass(frozen=True)
class Being:
    """A person or an animal. `he`, `him` and `his` are the pronouns, with `He` and `His` at the start of a sentence."""

    name: str  # "Mary", "Mary's mother", "the little dog"
    he: str
    him: str
    his: str
    kind: str  # "girl", "boy", "woman", "man", or an animal

    def __str__(self) -> str:
        return self.name

    @property
    def He(self) -> str:
        return self.he.capitalize()

    @property
    def His(self) -> str:
        return self.his.capitalize()

    @property
    def a(self) -> str:
        """An animal that was not mentioned before, such as "a little dog"."""
        return article(self.name.removeprefix("the "))


def female(name: str, kind: str) -> Being:
    return Being(name, "she", "her", "her", kind)


def male(name: str, kind: str) -> Being:
    return Being(name, "he", "him", "his", kind)


@dataclass(frozen=True)
class Thing:
    """A thing that one can hold, such as "the red ball"."""

    noun: str
    adjective: str

    def __str__(self) -> str:
        return f"the {self.adjective} {self.noun}"

    @property
    def a(self) -> str:
        return article(f"{self.adjective} {self.noun}")


@dataclass
class World:
    """The present state. `spots` says where each lost thing lies."""

    known: set[Being] = field(default_factory=set)
    holders: dict[Thing, Being] = field(default_factory=dict)
    spots: dict[Thing, str] = field(default_factory=dict)

    def meet(self, being: Being) -> None:
        assert being not in self.known, f"{being} is already part of the story"
        self.known.add(being)

    def take(self, being: Being, thing: Thing) -> None:
        assert being in self.known
        assert thing not in self.holders
        assert thing not in self.spots
        self.holders[thing] = being

    def give(self, giver: Being, taker: Being, thing: Thing) -> None:
        assert self.holders[thing] == giver != taker
        assert taker in self.known
        self.holders[thing] = taker

    def lose(self, being: Being, thing: Thing, spot: str) -> None:
        assert self.holders.pop(thing) == being
        self.spots[thing] = spot

    def find(self, being: Being, thing: Thing) -> str:
        """Pick up a lost thing, and return where it lay."""
        spot = self.spots.pop(thing)
        self.take(being, thing)
        return spot
