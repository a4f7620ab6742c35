"""Stories without end: text number `index` of a seed is always the same, and no two texts of a corpus are alike."""

import hashlib
import random
from collections.abc import Iterator

from model.training.stories import friend_plots, scenes, thing_plots
from model.training.stories.recall import recall_text
from model.training.stories.story import Story

PLOTS = (*thing_plots.PLOTS, *friend_plots.PLOTS)
RECALL_SHARE = 0.15


def tell(rng: random.Random) -> Story:
    """Tell a story of one of three lengths: a plot; a plot with scenes; two plots with scenes."""
    story = Story(rng)
    length = rng.randint(1, 3)
    scenes.open_story(story)
    scenes.meet_friend(story)
    scenes.go_out(story)
    for scene in rng.sample((scenes.weather, scenes.play, scenes.pass_a_thing), min(length, 2)):
        scene(story)
    story.paragraph()
    first, second = rng.sample(PLOTS, 2)
    scenes.turn(story)
    draw_roles(story)
    first(story)
    if length == 3:
        story.paragraph()
        story.say(
            "Some days later, {a} and {b} met again {at}.",
            "The next week, {a} and {b} went back to the {p}.",
            "On another day, {a} and {b} were {at} again.",
        )
        draw_roles(story)
        second(story)
    story.paragraph()
    scenes.close_story(story)
    return story


def draw_roles(story: Story) -> None:
    """Draw who is the hero of the next plot, so that the order of the introductions does not say it."""
    if story.rng.random() < 0.5:
        story.hero, story.friend = story.friend, story.hero


def texts(seed: int) -> Iterator[str]:
    """Stories and, among them, texts to copy from. Never ends."""
    seen: set[bytes] = set()
    index = 0
    while True:
        rng = random.Random(f"{seed} {index}")
        index += 1
        text = recall_text(rng) if rng.random() < RECALL_SHARE else tell(rng).text
        digest = hashlib.sha256(text.encode()).digest()
        if digest not in seen:
            seen.add(digest)
            yield text
