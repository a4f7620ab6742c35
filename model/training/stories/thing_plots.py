"""Plots about a thing and who has it: each tells one event and how it is put right. The hero has met the friend."""

from model.training.stories import words
from model.training.stories.story import HAPPY, SAD, Story


def lost_and_found(story: Story) -> None:
    a, b, thing, spot = story.hero, story.friend, story.new_thing(), story.rng.choice(words.HIDING_PLACES)
    story.roles = {"t": thing, "s": spot}
    story.own(a, thing)
    story.world.lose(a, thing, spot)
    story.say(
        "But {at}, {a} could not find {t} any more.",
        "Suddenly {a} saw that {t} was gone.",
        "But then {t} was gone, and {a} did not know where it was.",
        "When {a} looked in {a.his} bag, {t} was not there.",
    )
    story.feel(a, SAD, "{t} was lost")
    story.speak(b, "Do not worry. We will find {t}.", "Where did you see it last?", "I will help you look for it.")
    story.paragraph()
    story.say(
        "They looked everywhere {at}.",
        "{a} and {b} looked here and there.",
        "They walked back the way they had come.",
        "They looked for a long time.",
    )
    story.perhaps(
        "{a} looked up into the trees.", "{a} looked in every corner, but it was not there.", "Nobody had seen it."
    )
    story.world.find(b, thing)
    story.say(
        "At last, {b} found {t} {s}.", "Then {b} looked {s}, and there was {t}.", "{b} saw something {s}. It was {t}."
    )
    story.speak(b, "Look! Here it is!", "I found it!", "Is this your {t.noun}?")
    story.give(b, a, thing)
    story.speak(a, "Thank you, {b}!", "Thank you so much, {b}.")
    story.feel(a, HAPPY, "{b} had found {t}")


def sharing(story: Story) -> None:
    a, b = story.hero, story.friend
    food = story.rng.choice(words.FOODS)
    count = story.rng.choice(("two", "four", "six", "eight"))
    half = {"two": "one", "four": "two", "six": "three", "eight": "four"}[count]
    half_foods = food if half == "one" else words.plural(food)
    story.roles = {"n": count, "h": half}
    story.say(
        "{a} had {n} {f} in a bag, but {b} had none.",
        "{a} had brought {n} {f}. {b} had forgotten to bring anything to eat.",
        "{a} had {n} {f} for lunch, and {b} had nothing.",
        f=words.plural(food),
    )
    story.speak(b, "I am so hungry.", "May I have some?", "Those look good.")
    story.perhaps("At first, {a} wanted to keep everything.", "{a} thought about it for a moment.")
    story.say(
        "Then {a} saw how hungry {b} was, and gave {h} {f} to {b}.",
        "{a} did not want {b} to be hungry, so {a.he} gave {b} {h} {f}.",
        "So {a} kept {h} {f} and gave {h} to {b}.",
        f=half_foods,
    )
    story.speak(
        a,
        "Now we both have {h}.",
        "It tastes better when we share.",
        "One for you and one for me." if half == "one" else "{h} for you and {h} for me.",
    )
    story.feel(b, HAPPY, "{a} had shared the {f}", f=words.plural(food))
    story.perhaps("They ate together under a tree.", "They sat side by side and ate.")


def promise(story: Story) -> None:
    a, b, thing = story.hero, story.friend, story.new_thing()
    day = story.rng.choice(words.DAYS)
    story.roles = {"t": thing, "d": day}
    story.own(a, thing)
    story.speak(b, "May I borrow {t}?", "Can I play with {t} until {d}?")
    story.speak(a, "Yes, but please bring it back on {d}.", "Yes, if you promise to give it back on {d}.")
    story.speak(b, "I promise.", "I promise to bring it back on {d}.")
    story.give(a, b, thing)
    story.paragraph()
    story.say(
        "On {d}, it rained all day, but {b} had made a promise.",
        "When {d} came, {b} was tired, but {b.he} remembered the promise.",
        "On {d}, {b} wanted to keep {t}, but a promise is a promise.",
        "The days went by, and {b} took good care of {t}. Then it was {d}.",
    )
    story.say("{b} went to {a}'s house and knocked on the door.", "So {b} walked all the way to {a}'s house.")
    story.give(b, a, thing)
    story.speak(a, "You kept your promise!", "Thank you. I knew you would come.")
    story.feel(a, HAPPY, "{b} had kept the promise")


def mistake(story: Story) -> None:
    a, b, thing = story.hero, story.friend, story.new_thing(words.FRAGILE)
    story.roles = {"t": thing}
    story.own(b, thing)
    story.say(
        "{a} wanted to look at {t}, but {a.he} dropped it, and it broke.",
        "While {a} was running, {a.he} fell over {t} and broke it.",
        "{a} played with {t}, and suddenly it broke.",
    )
    story.feel(a, SAD, "{t} was broken")
    story.perhaps("{a} wanted to hide it, but that did not feel right.", "{a} thought about running away.")
    story.say(
        "{a} went to {b} and told {b.him} the truth.",
        "So {a} told {b} what had happened.",
        "{a} knew that {a.he} had to tell {b}.",
    )
    story.speak(a, "I am sorry. I broke {t}.", "I broke your {t.noun}. I am so sorry.")
    story.perhaps("{b} was sad, but {b.he} was not angry.", "{b} said nothing for a moment.")
    story.speak(b, "Thank you for telling me.", "Let us repair it together.", "That can happen to anybody.")
    story.paragraph()
    tool = story.rng.choice(("some glue", "a piece of string", "a little paint and some glue", "some strong tape"))
    story.say(
        "{a} brought {g}, and they repaired {t}.",
        "With {g}, {a} and {b} repaired {t}.",
        "They worked all afternoon with {g}. Then {t} was whole again.",
        g=tool,
    )
    story.feel(b, HAPPY, "{t} was as good as new")
    story.say(
        "{a} had learned to be more careful.",
        "{a} had learned that it is good to tell the truth.",
        "After that, {a} was always careful with other people's things.",
    )


def gift(story: Story) -> None:
    a, b, thing = story.hero, story.friend, story.new_thing()
    story.roles = {"t": thing}
    story.say(
        "It was {b}'s birthday, and {a} wanted to give {b.him} something.",
        "{b} had a birthday, but {a} had no gift yet.",
        "Soon it would be {b}'s birthday.",
    )
    story.say(
        "{a} knew that {b} wished for {t.a}.",
        "{b} had always wanted {t.a}, and {a} knew it.",
        "For a long time, {b} had dreamed of {t.a}.",
    )
    story.world.take(a, thing)
    story.say(
        "{a} saved {a.his} money and bought {t.a} at the market.",
        "{a} worked in the garden for three days, and then {a.he} could buy {t.a}.",
        "{a} found a shop that had {t.a}, and bought it.",
    )
    story.perhaps("{a} put it in a box with a ribbon.", "{a} hid it so that {b} would not see it.")
    story.paragraph()
    story.speak(a, "Happy birthday, {b}!", "This is for you, {b}.")
    story.give(a, b, thing)
    story.speak(b, "This is just what I wished for!", "How did you know?", "Thank you, {a}! It is beautiful.")
    story.feel(b, HAPPY, "{b.his} wish had come true")


def swap(story: Story) -> None:
    a, b, first, second = story.hero, story.friend, story.new_thing(), story.new_thing()
    story.roles = {"t": first, "s": second}
    story.own(a, first)
    story.own(b, second)
    story.say(
        "{a} looked at {s} and liked it. {b} looked at {t} and liked it too.",
        "{a} wished for {s}, and {b} wished for {t}.",
    )
    story.speak(a, "Would you like to swap?", "I will give you my {t.noun} for your {s.noun}.")
    story.speak(b, "Yes! That is a good idea.", "Yes, let us swap.")
    story.give(a, b, first)
    story.give(b, a, second)
    story.say("Now {a} had {s}, and {b} had {t}.", "After that, {b} played with {t}, and {a} played with {s}.")
    story.feel(b, HAPPY, "{b.he} had {t} now")


def passed_round(story: Story) -> None:
    a, b, c, thing = story.hero, story.friend, story.third, story.new_thing()
    story.roles = {"t": thing}
    story.own(a, thing)
    if c not in story.world.known:
        story.meet(
            c,
            "Then {new}, {k} {new.kind}, came along.",
            "Soon {k} {new.kind} named {new} joined them.",
            k=words.article(story.rng.choice(words.KINDS)),
        )
    story.speak(b, "May I hold {t}?", "Let us play a game with {t}.", "Can I see {t}?")
    story.give(a, b, thing)
    story.speak(c, "Can I have {t} too?", "Now me, please.", "May I hold it after {b}?")
    story.give(b, c, thing)
    if story.rng.random() < 0.5:
        story.give(c, a, thing)
    holder = story.world.holders[thing]
    story.paragraph()
    others = [being for being in (a, b, c) if being != holder]
    story.say(
        "Now {h} had {t}.",
        "In the end, {h} had {t}, and {x} and {y} watched.",
        "{t} was with {h} now.",
        h=holder,
        x=others[0],
        y=others[1],
    )
    story.say("{a}, {b} and {c} had a lot of fun.", "All three of them laughed.", "It was more fun with three.")
    story.feel(c, HAPPY, "{a} and {b} had let {c.him} play")


PLOTS = (lost_and_found, sharing, promise, mistake, gift, swap, passed_round)
