"""The words of the stories: names, things, animals, places, feelings and weather. Long lists, so that copying pays."""


def listed(text: str, separator: str | None = None) -> list[str]:
    """The words of a text, or its parts between separators. Line ends inside a part are spaces."""
    return [" ".join(part.split()) for part in text.split(separator)]


GIRLS = listed("""
Alice Anna Bella Clara Daisy Emma Flora Grace Hanna Ida Jane Kate Lily Lucy Mary Nora Olive Rosa Ruth Sally Sophie
Tess Vera Zoe
""")
BOYS = listed("""
Adam Ben Carl David Eric Felix Frank George Harry Jack John Leo Luke Max Noah Oscar Paul Peter Sam Simon Ted Tom
Victor Walter
""")
WOMEN = ("mother", "grandmother", "aunt", "big sister")
MEN = ("father", "grandfather", "uncle", "big brother")

# What one can carry, and what can break and be repaired.
THINGS = listed("""
ball book bell hat key map ring rope scarf shell spoon star stone toy basket blanket bottle bucket button card
chain coat coin crown flag glove horn necklace paintbrush pen pencil pillow purse ribbon shovel sock sponge
stick apron balloon feather marble notebook yo-yo
""")
FRAGILE = listed("""
boat box camera compass cup doll drum flute harp jar kite lamp mask mirror plate pot puppet puzzle teapot
telescope truck trumpet umbrella watch whistle windmill
""")
COLOURS = listed("red blue green yellow white black brown pink purple orange golden silver grey")
QUALITIES = listed("big small little old new shiny pretty tiny lovely")
FOODS = listed("""
apple pear peach plum banana orange cookie cake pancake muffin bun sandwich carrot tomato egg pie waffle
strawberry
""")
GROUND = """
under a bench|behind a tree|in the tall grass|next to a big rock|under a pile of leaves|behind the fence|near
the gate|under a bush|beside the path|between two stones|in a flower bed|at the foot of the hill
"""
HIDING_PLACES = listed(GROUND, "|")
PLACES = {  # with "at", "in", "on" or "by"
    **dict.fromkeys(listed("market farm playground zoo harbour beach castle mill pond pier waterfall well"), "at"),
    **dict.fromkeys(listed("park garden forest meadow village field orchard valley"), "in"),
    **dict.fromkeys(listed("hill island bridge"), "on"),
    **dict.fromkeys(listed("river lake sea stream"), "by"),
}
ANIMALS = listed("""
dog cat rabbit duck bird mouse squirrel frog hedgehog kitten puppy lamb goat pony fox turtle owl goose hen
beaver mole badger deer piglet calf sparrow robin crow swan
""")
KINDS = listed("kind brave clever quiet funny cheerful curious careful patient gentle shy lively")
DAYS = listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
SOME_TIMES = """
one day|one morning|one afternoon|one sunny day|one warm day|one cold morning|one quiet evening|one day in spring|
one day in summer|one day in autumn|early one morning|after breakfast one day|late one afternoon
"""
TIMES = (
    *listed(SOME_TIMES, "|"),
    *(f"one {day}" for day in DAYS),
    *(f"on a {kind} {day}" for kind in ("sunny", "windy", "quiet", "warm") for day in DAYS),
)
SKILLS = """swim|whistle|ride a bike|draw a horse|bake bread|climb a tree|play the drum|read a map|plant seeds|tie a
knot|fly a kite|skate|count to a hundred|write a letter|build a tower|sew a button|row a boat|juggle"""
SKILLS_TO_LEARN = listed(SKILLS, "|")
FEARS = listed("the dark|thunder|deep water|high places|loud noises|the old bridge|spiders|the big slide", "|")


def article(words: str) -> str:
    """The words with `a` or `an`. The lists have no word whose first letter misleads, such as `hour`."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def plural(noun: str) -> str:
    """The plural of a regular noun."""
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun == "tomato":
        return "tomatoes"
    return noun + "s"
