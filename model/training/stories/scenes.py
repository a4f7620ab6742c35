"""Beginnings, small scenes and endings, which go with every plot."""

from model.training.stories import words
from model.training.stories.story import HAPPY, Story


def open_story(story: Story) -> None:
    """Introduce the hero."""
    age, kind = story.rng.randint(4, 10), story.rng.choice(words.KINDS)
    story.meet(
        story.hero,
        "Once upon a time, there was {k} {new.kind} named {new}.",
        "There once was {k} {new.kind} called {new}.",
        "Once there lived {k} {new.kind} whose name was {new}.",
        "{new} was {k} {new.kind}.",
        "{new} was {k} {new.kind} who lived near the {p}.",
        "In a house near the {p} lived {k} {new.kind} named {new}.",
        "This is a story about {new}, {k} {new.kind}.",
        "Long ago, {k} {new.kind} named {new} lived in a small town.",
        k=words.article(kind),
    )
    story.perhaps("{a.He} was {n} years old.", n=age)
    story.perhaps(
        "{a.He} lived with {a.his} family in a little house.",
        "{a.He} liked to play outside.",
        "{a.He} loved going to the {p}.",
        "Every day, {a.he} walked to the {p}.",
        "{a.He} asked questions all day long.",
    )


def meet_friend(story: Story) -> None:
    story.meet(
        story.friend,
        "{a.His} best friend was {k} {new.kind} named {new}.",
        "{a} had a friend named {new}.",
        "{a} often played with {new}, {k} {new.kind} from the same street.",
        "Next door lived {k} {new.kind} named {new}.",
        k=words.article(story.rng.choice(words.KINDS)),
    )


def go_out(story: Story) -> None:
    """Take the hero and the friend to the place."""
    story.say(
        "{w}, {a} and {b} went to the {p}.",
        "{w}, {a} went to the {p} with {b}.",
        "{w}, {a} and {b} met {at}.",
        "{w}, {a} and {b} walked to the {p} together.",
        w=story.rng.choice(words.TIMES),
    )


def pass_a_thing(story: Story) -> None:
    """A sentence whose last name must be the one of two names that does not give: indirect object identification."""
    giver, taker = story.rng.sample((story.hero, story.friend), 2)
    first, second = story.rng.sample((story.hero, story.friend), 2)
    noun = story.rng.choice((*words.THINGS, *words.FRAGILE))
    story.say(
        "When {x} and {y} went to the {p}, {g} gave {t} to {r}.",
        "When {x} and {y} were {at}, {g} gave {t} to {r}.",
        "While {x} and {y} were playing, {g} gave {t} to {r}.",
        "After {x} and {y} had come to the {p}, {g} handed {t} to {r}.",
        "Then {x} and {y} sat down, and {g} showed {t} to {r}.",
        "When {x} and {y} came to the {p}, {g} said thank you to {r}.",
        x=first,
        y=second,
        g=giver,
        r=taker,
        t=words.article(story.rng.choice((noun, story.rng.choice(words.FOODS)))),
    )


def weather(story: Story) -> None:
    story.say(
        "The sun was shining, and the birds were singing.",
        "The sky was blue, and there was not a cloud in it.",
        "A soft wind was blowing.",
        "It was warm, and the grass smelled sweet.",
        "It was cold, but the sun was out.",
        "The leaves were falling from the trees.",
        "There were many people {at} that day.",
        "Nobody else was {at} that day.",
    )


def play(story: Story) -> None:
    story.say(
        "They played hide and seek, and {a} won.",
        "They ran races until they were out of breath.",
        "First {a} told a funny story, and then {b} told one too.",
        "{a} and {b} looked for pretty stones.",
        "{b} sang a song, and {a} danced to it.",
        "They watched the clouds and gave them names.",
        "They shared {f} for lunch.",
        f=words.article(story.rng.choice(words.FOODS)),
    )


def close_story(story: Story) -> None:
    """End the story: who went home, and what the heroes thought of the day."""
    story.perhaps("{a} and {b} laughed together.", "{a} smiled at {b}, and {b} smiled back.", "They hugged each other.")
    story.say(
        "At the end of the day, {a} and {b} walked home together.",
        "When the sun went down, {a} and {b} went home.",
        "That evening, {a} told {a.his} family everything.",
        "That night, {a} fell asleep with a smile.",
        "From that day on, {a} and {b} were the best of friends.",
        "{a} never forgot that day.",
        "It had been a good day for {a} and {b}.",
        "{a} and {b} lived happily ever after.",
    )
    if story.rng.random() < 0.2:
        story.feel(story.hero, HAPPY, "{b} was such a good friend")


def turn(story: Story) -> None:
    """Lead over to a plot."""
    story.say(
        "Then something happened.",
        "But that day was different.",
        "Here is what happened next.",
        "After a while, they sat down to rest.",
        "Then {a} stopped and looked at {b}.",
        "A little later, {a} and {b} were alone {at}.",
    )
