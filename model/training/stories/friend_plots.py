"""Plots about fear, weather, learning, trouble and quarrels, and how a friend helps. The hero has met the friend."""

from model.training.stories import words
from model.training.stories.story import HAPPY, SAD, Story


def fear_and_help(story: Story) -> None:
    a, b, fear = story.hero, story.friend, story.rng.choice(words.FEARS)
    story.roles = {"f": fear}
    story.say(
        "{a} was afraid of {f}.",
        "There was one thing that {a} feared: {f}.",
        "{a} was brave, but {a.he} was afraid of {f}.",
    )
    story.perhaps("{a.He} had never told anybody.", "Nobody knew about it.")
    story.speak(a, "I am scared.", "I am afraid of {f}.", "I cannot do this.")
    story.say(
        "{b} did not laugh. {b.He} took {a} by the hand.",
        "{b} took {a}'s hand and held it.",
        "{b} sat down next to {a} and listened.",
    )
    story.speak(
        b,
        "We can do it together.",
        "I was afraid of {f} too, but now I am not.",
        "I am here. Take a deep breath.",
        "Let us count to ten.",
    )
    story.paragraph()
    story.say(
        "{a} took a deep breath and closed {a.his} eyes.",
        "Slowly, {a} counted to ten with {b}.",
        "Step by step, {a} became braver.",
        "{a} held {b}'s hand very tightly.",
    )
    story.say(
        "After a while, {f} did not seem so bad.",
        "Soon {a} was not afraid of {f} any more.",
        "Then nothing bad happened, and {a} began to laugh.",
    )
    story.feel(a, HAPPY, "{b} had stayed with {a.him}")


def storm(story: Story) -> None:
    a, b = story.hero, story.friend
    weather, sign, shelter = story.rng.choice(
        (
            ("rain", "Dark clouds came over the hill", "under a big tree"),
            ("rain", "The sky became grey", "in an empty hut"),
            ("rain", "The sky became dark", "in a warm barn"),
            ("hail", "The clouds became black", "under an old bridge"),
        )
    )
    story.roles = {"w": weather, "s": sign, "x": shelter}
    story.say("{s}, and it began to {w}.", "{s}. Soon it began to {w}.")
    story.say(
        "{a} had no coat and was getting cold.", "{a} and {b} were getting cold.", "The wind blew harder and harder."
    )
    story.speak(b, "Quick, let us hide {x}!", "Come with me! We can stay dry {x}.")
    story.say("They ran as fast as they could and sat down {x}.", "{a} and {b} ran and hid {x}.")
    story.perhaps(
        "{b} gave half of {b.his} blanket to {a}.",
        "{b} told a story so that {a} would not be afraid.",
        "They sang songs while they waited.",
    )
    story.paragraph()
    story.say(
        "After an hour, the {w} stopped.",
        "At last, the {w} stopped and the sun came out.",
        "When the {w} was over, everything was quiet.",
    )
    story.perhaps(
        *(
            ("There was a rainbow in the sky.", "The grass was wet and shiny.")
            if weather == "rain"
            else ("The ground was all white.", "Little balls of ice lay everywhere.")
        )
    )
    story.feel(a, HAPPY, "{b} had known where to hide")


def lesson(story: Story) -> None:
    a, b, skill = story.hero, story.friend, story.rng.choice(words.SKILLS_TO_LEARN)
    story.roles = {"s": skill}
    story.say(
        "{a} wanted to learn how to {s}.", "{a} could not {s}, but {b} could.", "{b} knew how to {s}, but {a} did not."
    )
    story.speak(a, "Can you teach me to {s}?", "Will you show me how to {s}?", "I wish I could {s}.")
    story.speak(b, "Yes, of course. Watch me first.", "It is not hard. You only have to try.", "I will show you how.")
    story.say(
        "{a} tried, but it did not work.",
        "The first time, {a} failed.",
        "{a} tried three times, and each time it went wrong.",
    )
    story.perhaps("{a} wanted to give up.", "{a} was close to tears.")
    story.speak(
        b, "Try again, {a}.", "Do not give up, {a}. You are getting better.", "I needed a whole week to learn it."
    )
    story.paragraph()
    story.say("{a} tried again and again.", "The next day, {a} tried again.", "{a} practised every day.")
    story.say(
        "At last, {a} could {s}.", "Then, all at once, {a} knew how to {s}.", "Soon {a} could {s} as well as {b}."
    )
    story.feel(a, (*HAPPY, "proud"), "{a.he} had learned to {s}")
    story.perhaps("{b} was proud of {a}.", '"I knew you could do it," said {b}.')


def lost_animal(story: Story) -> None:
    a, b, animal = story.hero, story.friend, story.animal
    story.roles = {"x": animal}
    story.meet(
        animal,
        "Near the {p}, they saw {new.a}.",
        "Suddenly they heard a noise. It was {new.a}.",
        "Under a tree sat {new.a}.",
    )
    trouble, help_ = story.rng.choice(
        (
            ("{x} was stuck in a net", "carefully cut the net"),
            ("{x} had hurt {x.his} leg", "put a soft cloth around the leg"),
            ("{x} was lost and hungry", "gave {x.him} some food"),
            ("{x} had fallen into a hole", "lifted {x.him} out of the hole"),
            ("{x} was cold and wet", "dried {x.him} with a scarf"),
        )
    )
    story.say(trouble + ".")
    story.feel(a, SAD, trouble)
    story.speak(a, "We must help {x.him}.", "Poor little thing! What can we do?")
    story.perhaps("{x} looked at {a} with big eyes.", "{x} did not run away.")
    story.say(
        "{b} held {x} while {a} {h}.", "{a} knelt down and {h}. {b} spoke softly to {x}.", h=help_.format(x=animal)
    )
    story.paragraph()
    story.say("Soon {x} was well again.", "After a while, {x} felt better.", "Then {x} was safe.")
    story.say(
        "From then on, {x} came to see {a} every day.",
        "{x} followed {a} and {b} all the way home.",
        "{x} looked back once more and went home to {x.his} family.",
    )
    story.feel(b, HAPPY, "they had helped {x}")


def advice(story: Story) -> None:
    a, b = story.hero, story.friend
    adult = story.new_adult(a)
    story.roles = {"x": adult}
    story.say(
        "{a} and {b} had a quarrel.",
        "{a} and {b} both wanted to be first, and they began to shout.",
        "That day, {a} said something unkind to {b}.",
    )
    story.say("{b} went away without a word.", "{b} turned around and left.")
    story.feel(a, SAD, "{b} had gone away")
    story.paragraph()
    story.meet(
        adult,
        "At home, {new} saw that something was wrong.",
        "Then {new} came and sat down next to {a}.",
        "{new} found {a} alone in the garden.",
    )
    story.speak(adult, "What happened, {a}?", "Why are you so quiet, {a}?")
    story.say("{a} told {x.him} everything.", "{a} told {x.him} about {b}.")
    story.speak(
        adult,
        "A friend is more important than being right.",
        "Go and say that you are sorry.",
        "Think about how {b} feels now.",
    )
    story.paragraph()
    story.say(
        "So {a} ran to {b}'s house.",
        "{a} thought about it, and then {a.he} went to see {b}.",
        "The next morning, {a} went to {b}.",
    )
    story.speak(a, "I am sorry, {b}.", "I was wrong, {b}. Please forgive me.")
    story.speak(b, "I am sorry too.", "I forgive you, {a}.", "Let us be friends again.")
    story.feel(a, HAPPY, "they were friends again")


PLOTS = (fear_and_help, storm, lesson, lost_animal, advice)
