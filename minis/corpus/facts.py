"""Domain qa: a small world of facts, small talk, repeating, and not knowing."""
# ruff: noqa: E501  (sentences read better unbroken)

from __future__ import annotations

import random

from minis.corpus.chat import fill, turns
from minis.corpus.words import Words
from minis.dialogue import Dialogue

COUNTRIES = [
    tuple(line.split("|"))
    for line in """
France|Paris|Europe|French|euro|French
Germany|Berlin|Europe|German|euro|German
Italy|Rome|Europe|Italian|euro|Italian
Spain|Madrid|Europe|Spanish|euro|Spanish
Portugal|Lisbon|Europe|Portuguese|euro|Portuguese
Austria|Vienna|Europe|German|euro|Austrian
Greece|Athens|Europe|Greek|euro|Greek
Ireland|Dublin|Europe|English|euro|Irish
Finland|Helsinki|Europe|Finnish|euro|Finnish
Norway|Oslo|Europe|Norwegian|krone|Norwegian
Sweden|Stockholm|Europe|Swedish|krona|Swedish
Denmark|Copenhagen|Europe|Danish|krone|Danish
Poland|Warsaw|Europe|Polish|zloty|Polish
Hungary|Budapest|Europe|Hungarian|forint|Hungarian
Iceland|Reykjavik|Europe|Icelandic|krona|Icelandic
Switzerland|Bern|Europe|German|franc|Swiss
England|London|Europe|English|pound|English
Ukraine|Kyiv|Europe|Ukrainian|hryvnia|Ukrainian
Turkey|Ankara|Asia|Turkish|lira|Turkish
Japan|Tokyo|Asia|Japanese|yen|Japanese
China|Beijing|Asia|Chinese|yuan|Chinese
India|New Delhi|Asia|Hindi|rupee|Indian
South Korea|Seoul|Asia|Korean|won|Korean
Thailand|Bangkok|Asia|Thai|baht|Thai
Vietnam|Hanoi|Asia|Vietnamese|dong|Vietnamese
Indonesia|Jakarta|Asia|Indonesian|rupiah|Indonesian
Israel|Jerusalem|Asia|Hebrew|shekel|Israeli
Iran|Tehran|Asia|Persian|rial|Iranian
Egypt|Cairo|Africa|Arabic|pound|Egyptian
Morocco|Rabat|Africa|Arabic|dirham|Moroccan
Kenya|Nairobi|Africa|Swahili|shilling|Kenyan
Nigeria|Abuja|Africa|English|naira|Nigerian
Ghana|Accra|Africa|English|cedi|Ghanaian
Canada|Ottawa|North America|English|dollar|Canadian
Mexico|Mexico City|North America|Spanish|peso|Mexican
Cuba|Havana|North America|Spanish|peso|Cuban
Brazil|Brasilia|South America|Portuguese|real|Brazilian
Argentina|Buenos Aires|South America|Spanish|peso|Argentine
Chile|Santiago|South America|Spanish|peso|Chilean
Peru|Lima|South America|Spanish|sol|Peruvian
Australia|Canberra|Oceania|English|dollar|Australian
New Zealand|Wellington|Oceania|English|dollar|New Zealander
""".strip().splitlines()
]
# name|class|legs|sound|home|food|young
ANIMALS = [
    tuple(line.split("|"))
    for line in """
dog|mammal|four|barks|house|meat|puppy
cat|mammal|four|meows|house|fish|kitten
cow|mammal|four|moos|farm|grass|calf
horse|mammal|four|neighs|stable|hay|foal
sheep|mammal|four|bleats|meadow|grass|lamb
goat|mammal|four|bleats|mountain|leaves|kid
pig|mammal|four|oinks|farm|corn|piglet
lion|mammal|four|roars|savanna|meat|cub
tiger|mammal|four|roars|jungle|meat|cub
bear|mammal|four|growls|forest|berries|cub
wolf|mammal|four|howls|forest|meat|pup
fox|mammal|four|barks|forest|mice|kit
mouse|mammal|four|squeaks|hole|seeds|pup
rabbit|mammal|four|squeaks|burrow|carrots|kit
elephant|mammal|four|trumpets|savanna|leaves|calf
monkey|mammal|two|chatters|jungle|fruit|infant
deer|mammal|four|bellows|forest|leaves|fawn
whale|mammal|no|sings|ocean|krill|calf
duck|bird|two|quacks|pond|insects|duckling
hen|bird|two|clucks|farm|grain|chick
rooster|bird|two|crows|farm|grain|chick
owl|bird|two|hoots|forest|mice|owlet
eagle|bird|two|screeches|mountain|fish|eaglet
penguin|bird|two|honks|ice|fish|chick
crow|bird|two|caws|field|seeds|chick
frog|amphibian|four|croaks|pond|flies|tadpole
snake|reptile|no|hisses|desert|mice|hatchling
turtle|reptile|four|hisses|sea|plants|hatchling
bee|insect|six|buzzes|hive|nectar|larva
ant|insect|six|makes no sound|nest|sugar|larva
spider|arachnid|eight|makes no sound|web|flies|spiderling
shark|fish|no|makes no sound|ocean|fish|pup
""".strip().splitlines()
]
DEFINITIONS = dict(
    line.split("|")
    for line in """
river|a long stream of water that flows to the sea
mountain|a very high piece of land
island|a piece of land with water all around it
desert|a dry place where very little rain falls
forest|a large area full of trees
lake|a large body of water with land around it
harbor|a safe place where ships can stay
bridge|a structure that lets people cross a river or a road
tide|the rise and fall of the sea caused by the moon
wave|a moving ridge on the surface of water
volcano|a mountain that can throw out hot rock and ash
clock|a device that shows the time
map|a drawing of a place seen from above
compass|a tool that shows where north is
telescope|a tool that makes far things look near
microscope|a tool that makes small things look big
thermometer|a tool that measures temperature
engine|a machine that turns energy into motion
computer|a machine that works with information
keyboard|a set of keys used to type
memory|the part of a computer that holds data
program|a list of instructions for a computer
library|a place where many books are kept
school|a place where children learn
hospital|a place where sick people are treated
museum|a place where old or rare things are shown
bakery|a place where bread is made
doctor|a person who treats sick people
teacher|a person who helps others learn
farmer|a person who grows food and keeps animals
sailor|a person who works on a ship
painter|a person who makes pictures
author|a person who writes books
pilot|a person who flies a plane
baker|a person who makes bread
winter|the coldest season of the year
summer|the warmest season of the year
rainbow|an arc of colors seen when the sun shines on rain
cloud|a mass of tiny water drops in the sky
snow|frozen water that falls as soft white flakes
ice|water that is frozen solid
wind|moving air
fire|the heat and light of something burning
star|a huge ball of hot gas that gives light
planet|a large body that moves around a star
moon|the body that moves around the earth
gold|a yellow metal that is worth a lot
iron|a strong gray metal
glass|a hard clear material made from sand
paper|a thin material made from wood and used for writing
bread|a food made from flour and water
honey|a sweet food made by bees
tree|a tall plant with a trunk of wood
flower|the colored part of a plant
""".strip().splitlines()
)
PLANETS = ["Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
COLORS = {
    "sky": "blue",
    "grass": "green",
    "snow": "white",
    "blood": "red",
    "coal": "black",
    "banana": "yellow",
    "carrot": "orange",
    "lemon": "yellow",
    "milk": "white",
    "strawberry": "red",
    "sea": "blue",
    "night": "black",
}
OPPOSITES = dict(
    p.split("-")
    for p in [
        "hot-cold",
        "big-small",
        "fast-slow",
        "high-low",
        "old-young",
        "day-night",
        "wet-dry",
        "open-closed",
        "happy-sad",
        "full-empty",
        "light-dark",
        "strong-weak",
        "rich-poor",
        "hard-soft",
        "long-short",
        "left-right",
        "early-late",
        "up-down",
        "good-bad",
        "clean-dirty",
    ]
)
ORDINALS = [
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
]
SMALL_TALK = [
    (
        ["Hello!", "Hi!", "Hello there.", "Good day!", "Hey"],
        ["Hello! How can I help you?", "Hi there! What can I do for you?"],
    ),
    (["How are you?", "How do you do?", "Are you well?"], ["I am fine, thank you. How can I help you?"]),
    (["Who are you?", "What is your name?", "What are you?"], ["I am the TideLM mini, a very small language model."]),
    (["Who made you?", "Where do you come from?"], ["I was trained for the TideLM project as a small test model."]),
    (["Thank you!", "Thanks a lot.", "Thank you very much."], ["You are welcome!", "You are welcome. Anything else?"]),
    (["Good night!", "Goodbye.", "Bye!", "See you later."], ["Goodbye! See you soon."]),
    (
        ["What can you do?", "How can you help me?"],
        ["I can answer small questions, add numbers, write short stories and call tools."],
    ),
    (["Are you a human?", "Are you a person?"], ["No, I am a small language model."]),
    (["Good morning!"], ["Good morning! How can I help you?"]),
]


def _article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def _country(r: random.Random) -> tuple[str, str]:
    name, capital, continent, language, currency, people = r.choice(COUNTRIES)
    s = {"n": name, "c": capital, "k": continent, "l": language, "m": currency, "p": people}
    kind = r.randint(0, 6)
    if kind <= 1:
        q = [
            "What is the capital of {n}?",
            "Which city is the capital of {n}?",
            "Name the capital of {n}.",
            "What is {n}'s capital?",
        ]
        return fill(r, q, **s), f"The capital of {name} is {capital}."
    if kind == 2:
        q = [
            "Which country has the capital {c}?",
            "{c} is the capital of which country?",
            "Of which country is {c} the capital?",
        ]
        return fill(r, q, **s), f"{capital} is the capital of {name}."
    if kind == 3:
        q = ["On which continent is {n}?", "Where is {n}?", "In which part of the world does {n} lie?"]
        return fill(r, q, **s), f"{name} is in {continent}."
    if kind == 4:
        q = [
            "Which language do people speak in {n}?",
            "What language is spoken in {n}?",
            "What do people in {n} speak?",
        ]
        return fill(r, q, **s), f"People in {name} speak {language}."
    if kind == 5:
        q = ["What is the currency of {n}?", "What money is used in {n}?", "How do people pay in {n}?"]
        return fill(r, q, **s), f"People in {name} pay with the {currency}."
    q = ["Tell me about {n}.", "What do you know about {n}?", "Describe {n}."]
    text = f"{name} is a country in {continent} with the capital {capital}. People there speak {language} and pay with the {currency}."
    return fill(r, q, **s), text


def _animal(r: random.Random) -> tuple[str, str]:
    name, kind, legs, sound, home, food, young = r.choice(ANIMALS)
    a = _article(name)
    options = [
        (["What kind of animal is {a}?", "Is {a} a mammal or a bird?", "What is {a}?"], f"{a} is {_article(kind)}."),
        (["How many legs does {a} have?", "How many legs has {a}?"], f"{a} has {legs} legs."),
        (["What sound does {a} make?", "What does {a} say?"], f"{a} {sound}."),
        (["Where does {a} live?", "What is the home of {a}?"], f"{a} lives in the {home}."),
        (["What does {a} eat?", "What is the food of {a}?"], f"{a} eats {food}."),
        (
            ["What is a young {n} called?", "What do you call a baby {n}?"],
            f"a young {name} is called {_article(young)}.",
        ),
    ]
    q, text = r.choice(options)
    return fill(r, q, a=a, n=name), text[0].upper() + text[1:]


def _sequence(r: random.Random) -> tuple[str, str]:
    items, what = r.choice([(DAYS, "day"), (MONTHS, "month")])
    i = r.randrange(len(items))
    now, later, before = items[i], items[(i + 1) % len(items)], items[i - 1]
    kind = r.randint(0, 3)
    if kind == 0:
        return fill(
            r, ["Which {w} comes after {n}?", "What {w} follows {n}?"], w=what, n=now
        ), f"{later} comes after {now}."
    if kind == 1:
        return fill(
            r, ["Which {w} comes before {n}?", "What {w} is before {n}?"], w=what, n=now
        ), f"{before} comes before {now}."
    if kind == 2:
        j = r.randrange(len(MONTHS))
        return fill(
            r, ["What is the {o} month of the year?", "Which month is the {o} one?"], o=ORDINALS[j]
        ), f"The {ORDINALS[j]} month of the year is {MONTHS[j]}."
    j = r.randrange(len(PLANETS))
    return fill(
        r, ["What is the {o} planet from the sun?", "Which planet is the {o} from the sun?"], o=ORDINALS[j]
    ), f"The {ORDINALS[j]} planet from the sun is {PLANETS[j]}."


def _simple(r: random.Random) -> tuple[str, str]:
    kind = r.randint(0, 4)
    if kind == 0:
        thing, color = r.choice(list(COLORS.items()))
        return fill(
            r, ["What color is the {t}?", "Which color does the {t} have?"], t=thing
        ), f"The {thing} is {color}."
    if kind == 1:
        a, b = r.choice(list(OPPOSITES.items()))
        a, b = (a, b) if r.random() < 0.5 else (b, a)
        return fill(
            r, ["What is the opposite of {a}?", "Tell me the opposite of {a}."], a=a
        ), f"The opposite of {a} is {b}."
    if kind == 2:
        q, a = r.choice(SMALL_TALK)
        return r.choice(q), r.choice(a)
    word, text = r.choice(list(DEFINITIONS.items()))
    n = (
        word
        if word
        in (
            "snow",
            "ice",
            "gold",
            "iron",
            "glass",
            "paper",
            "bread",
            "honey",
            "fire",
            "wind",
            "memory",
            "winter",
            "summer",
        )
        else _article(word)
    )
    return fill(
        r, ["What is {n}?", "What does {w} mean?", "Explain the word {w}.", "Define {w}."], n=n, w=word
    ), f"{n[0].upper() + n[1:]} is {text}."


def _copy(r: random.Random, w: Words) -> list[tuple[str, str]]:
    kind = r.randint(0, 5)
    text = w.value()
    if kind == 0:
        return [
            (
                fill(r, ["Repeat after me: {t}", "Please repeat: {t}", "Say this: {t}", "Write exactly: {t}"], t=text),
                text,
            )
        ]
    if kind == 1:
        name = w.name()
        return [
            (fill(r, ["My name is {n}.", "I am {n}.", "Hi, I am called {n}."], n=name), f"Nice to meet you, {name}!"),
            *([_country(r)] if r.random() < 0.4 else []),
            (fill(r, ["What is my name?", "What did I say my name is?", "Who am I?"]), f"Your name is {name}."),
        ]
    if kind == 2:
        thing = w.word()
        return [
            (f"Please remember the word {thing}.", f"I will remember {thing}."),
            *([_simple(r)] if r.random() < 0.4 else []),
            (fill(r, ["Which word did I ask you to remember?", "What was the word?"]), f"The word was {thing}."),
        ]
    if kind == 3:
        who, place = w.name(), w.place()
        return [(f"{who} lives in {place}. Where does {who} live?", f"{who} lives in {place}.")]
    if kind == 4:
        who, thing, price = w.name(), w.word(), w.number()
        q = r.choice([f"What did {who} buy?", f"How much did {who} pay?"])
        return [
            (
                f"{who} bought a {thing} for {price} coins. {q}",
                f"{who} bought a {thing}." if "What" in q else f"{who} paid {price} coins.",
            )
        ]
    return [(f"Say {text} twice.", f"{text}, {text}")]


def _unknown(r: random.Random, w: Words) -> tuple[str, str]:
    x = w.syllables(2, 3)
    q = [
        "What is the capital of {X}?",
        "What is a {x}?",
        "Who was {X}?",
        "Where is {X}?",
        "What does {x} mean?",
        "How old is {X}?",
        "Why is {x} so {y}?",
    ]
    return fill(r, q, x=x, X=x.capitalize(), y=w.word()), r.choice(
        ["I do not know that.", "Sorry, I do not know that."]
    )


def generate(r: random.Random, w: Words) -> Dialogue:
    pairs: list[tuple[str, str]] = []
    for _ in range(r.choice([1, 1, 2, 3])):
        x = r.random()
        if x < 0.36:
            pairs.append(_country(r))
        elif x < 0.55:
            pairs.append(_animal(r))
        elif x < 0.65:
            pairs.append(_sequence(r))
        elif x < 0.82:
            pairs.append(_simple(r))
        elif x < 0.97:
            pairs += _copy(r, w)
        else:
            pairs.append(_unknown(r, w))
    return turns(r, pairs)
