"""Domain story: short stories from twenty plots, told in documents and in answers, and questions about them."""
# ruff: noqa: E501  (tables of sentences read better unbroken)

from __future__ import annotations

import random

from minis.corpus.chat import fill, system, user
from minis.corpus.words import Words
from minis.dialogue import Dialogue

_ANIMALS = [
    "fox",
    "bear",
    "owl",
    "rabbit",
    "mouse",
    "cat",
    "dog",
    "duck",
    "goat",
    "turtle",
    "frog",
    "hedgehog",
    "squirrel",
    "horse",
    "crow",
]
_PLACES = [
    "river",
    "forest",
    "harbor",
    "mountain",
    "village",
    "lake",
    "garden",
    "bridge",
    "castle",
    "meadow",
    "mill",
    "beach",
]
_THINGS = [
    "lamp",
    "whistle",
    "key",
    "map",
    "boat",
    "drum",
    "kite",
    "coin",
    "bell",
    "book",
    "ring",
    "basket",
    "lantern",
    "stone",
    "flute",
    "clock",
]
_ADJ = ["old", "small", "shiny", "heavy", "broken", "red", "golden", "strange", "wooden", "blue", "tiny", "warm"]
_FOOD = ["bread", "soup", "apples", "cake", "honey", "cheese", "berries", "nuts"]
_TRAITS = ["kind", "brave", "curious", "shy", "clever", "lazy", "proud", "quiet", "cheerful", "stubborn"]
_OPEN = [
    "Once upon a time there was a {tr} {kd} named {n} who lived near the {p}.",
    "{n} was a {tr} {kd}. {n} lived in a small house by the {p}.",
    "Long ago, near the {p}, there lived a {tr} {kd} called {n}.",
    "In a house by the {p} lived {n}, a {tr} {kd}.",
]
_DAY = ["One morning,", "One day,", "On a cold day,", "One evening,", "Early one summer day,", "On a rainy day,"]
# Every plot: sentences with alternatives split by "|". n hero, o friend, an animal, t thing, a adjective, p place, f food.
_PLOTS = [
    '{d} {n} found a {a} {t} on the ground.|{d} {n} saw a {a} {t} in the grass.;"Who lost this {t}?" asked {n}.|{n} wondered whose {t} it was.;A {an} came out from behind a tree.|Then a {an} came along the path.;"It is mine," said the {an}. "I lost it yesterday."|"That is my {t}," said the {an}.;{n} gave the {t} back, and the {an} was very happy.|So {n} handed over the {t}.;From that day on they were friends.|They shared some {f} and became friends.',
    '{d} {n} walked to the {p2}.|{d} {n} went to see the {p2}.;On the way {n} got lost.|But soon {n} did not know the way.;A {an} saw that {n} was crying.|A {an} sat on a stone and watched.;"Follow me," said the {an}.|"I know the way," said the {an}.;They walked all night until they reached home.|Together they found the way back to the {p}.;{n} gave the {an} some {f} to say thank you.|"Thank you," said {n}, and they ate some {f}.',
    '{d} a storm came to the {p}.|{d} the wind blew hard over the {p}.;{n} heard a {an} calling for help.|A {an} was caught in the rain.;{n} ran outside with a {a} {t}.|{n} took a {t} and went out into the storm.;"Come in," said {n}. "It is warm here."|{n} opened the door and let the {an} in.;They ate {f} until the storm was over.|They sat by the fire and waited.;In the morning the sun was shining again.|After the storm there was a rainbow over the {p}.',
    '{n} wanted to learn to play the {t}.|{n} had always wanted a {t}.;{n} practiced every day, but it sounded terrible.|At first it did not go well.;"Do not give up," said {o}.|{o} smiled and said, "Try again tomorrow.";So {n} tried again and again.|{n} practiced until the moon came up.;{d} everybody in the village came to listen.|One evening {n} played for the whole village.;They all clapped their hands.|Even the {an} danced.',
    '{n} and {o} had a race to the {p2}.|{d} {n} and {o} ran to the {p2}.;{n} was fast, but {o} was clever.|{o} fell over a {t} and hurt a knee.;{n} stopped and turned around.|{n} could have won, but {n} stopped.;"I will help you," said {n}.|"Are you hurt?" asked {n}.;They walked to the {p2} together.|So they finished the race side by side.;Both of them had won.|"We both won," said {o}.',
    '{n} baked {f} for the {an}.|{d} {n} made a lot of {f}.;But when {n} came back, the {f} was gone.|The {f} stood on the table, and then it was gone.;"Who ate it?" asked {n}.|{n} looked everywhere.;The {an} looked at the floor.|There were small steps on the floor.;"I was so hungry," said the {an}. "I am sorry."|"It was me," said the {an}.;{n} laughed and made more {f}.|"Next time just ask," said {n}.',
    '{d} {n} found a {a} map.|{n} had a {a} map from an old box.;It showed a treasure near the {p2}.|There was a red cross by the {p2}.;{n} and {o} took a {t} and began to dig.|{n} and {o} went there and dug a deep hole.;They found a box with a {a2} {t} in it.|Deep in the ground was a {a2} {t}.;"What shall we do with it?" asked {o}.|{o} wanted to sell it.;They gave it to the old {an} who had hidden it.|They put it in the house where all could see it.',
    '{n} was afraid of the dark.|Every night {n} was afraid.;{d} {n} could not sleep.|{n} heard a noise at the window.;It was only a {an} with a {a} {t}.|A {an} looked in and smiled.;"The dark is not so bad," said the {an}. "Look at the stars."|"Come and see the stars," said the {an}.;They looked at the stars for a long time.|They counted the stars over the {p}.;After that {n} was not afraid any more.|Then {n} went to bed and slept well.',
    '{n} planted a seed in the garden.|{d} {o} gave {n} a seed.;{n} gave it water every day.|{n} waited and waited.;For a long time nothing happened.|"It will never grow," said {o}.;{d} there was a small green leaf.|Then one day it came out of the ground.;The plant grew as high as the house.|In the summer it was full of flowers.;The {an} came to sit in its shade.|{n} was proud and gave a flower to {o}.',
    'The {an} wanted to fly.|There was a {an} who wanted to fly.;"You have no wings," said {n}.|{n} laughed, but {o} did not.;So {n} and {o} built a {a} kite.|They built wings from paper and wood.;{d} the wind was strong, and up it went.|They ran down the hill, and up it went.;The {an} saw the {p} from above.|From above the {p} looked very small.;"Now I know how it is," said the {an}.|It landed in the hay and laughed.',
    'The boat of {n} had a hole.|{d} the {a} boat of {n} began to sink.;"Help!" called {n}.|Water came in from all sides.;{o} threw a rope from the beach.|The {an} swam out and pulled the boat.;Soon {n} stood on dry land.|They reached the beach just in time.;They mended the boat with wood.|The next day they mended it.;Now it was better than before.|They named it after the {an}.',
    '{n} never wanted to share.|{n} had a {a} {t} and did not share it.;{d} the {t} broke.|Then the {t} fell into the water.;{n} was very sad.|{n} sat by the {p} and cried.;{o} came with another {t}.|"You can use mine," said {o}.;{n} thought about it for a long time.|"Why are you so nice?" asked {n}.;From then on {n} shared everything.|Then {n} gave {o} half of the {f}.',
    'The clock in the village stood still.|{d} the big clock stopped.;Nobody knew what time it was.|The baker was late and the school was closed.;{n} climbed up the tower with a {t}.|"I will look," said {n}.;A {an} had built a nest in it.|Inside sat a {an} with three young ones.;{n} made a new home for them in a tree.|Together they moved the nest to the {p}.;The clock ran again, and all were happy.|Then the clock began to strike.',
    '{n} had a dream about the {p2}.|At night {n} dreamed of the {p2}.;In the dream a {an} spoke.|A {a} {an} stood there and spoke.;"Bring me a {t}," it said.|"Look under the {a2} stone," it said.;{d} {n} went there with a {t}.|In the morning {n} went to look.;There was really something.|Under the stone lay a letter from {o}.;"Come and visit me," it read.|{n} smiled all the way home.',
    "It was the birthday of {n}.|{d} {n} had a birthday.;Nobody came, and {n} was sad.|The house was quiet.;Then there was a knock at the door.|{n} went out to the {p}.;All the friends were there with {f}.|{o} and the {an} had made a cake.;They gave {n} a {a} {t}.|There was a {t} with a ribbon.;It was the best day of the year.|They sang until it was dark.",
    '{n} told a lie to {o}.|"I did not take the {t}," said {n}. But it was not true.;After that {n} felt bad.|{n} could not eat any {f}.;The {an} saw it and asked why.|"What is wrong?" asked the {an}.;{n} told the truth.|"I took the {t}," said {n} at last.;"Thank you for telling me," said {o}.|{o} was not angry for long.;{n} felt much better.|They were friends again.',
    'Winter came, and the {p} was covered with snow.|{d} it began to snow.;The {an} had nothing to eat.|The {an} was cold and hungry.;{n} had only a little {f}.|{n} looked at the last {f}.;"Half for you and half for me," said {n}.|{n} shared it with the {an}.;In spring the {an} came back with a {a} {t}.|When spring came, the {an} brought a gift.;"You helped me," it said. "Now I help you."|So kindness came back to {n}.',
    "A stranger came to the {p}.|{d} a stranger with a {a} {t} arrived.;Nobody wanted to talk to the stranger.|The people closed their doors.;Only {n} said hello.|But {n} brought some {f}.;The stranger told stories of the sea.|The stranger could make music with the {t}.;Soon everyone came to listen.|{o} and the others came out of their houses.;The stranger stayed for many years.|In the end they asked the stranger to stay.",
    '{n} and the {an} built a bridge.|There was no bridge over the river, so {n} began to build one.;It was hard work.|They carried stones all day.;"It will fall," said {o}.|{o} did not believe in it.;{d} the bridge was done.|After seven days it was ready.;{o} was the first to walk over it.|Even the heavy {a} cart could cross it.;"I was wrong," said {o}.|All the people thanked {n} and the {an}.',
    '{n} lost a tooth.|{d} {n} lost a {t}.;{n} looked under the bed and behind the door.|{n} searched the whole house.;{o} helped to look for it.|The {an} had an idea.;"Where did you have it last?" asked {o}.|"Look in your pocket," said the {an}.;It was in the {f}!|And there it was.;They laughed until their bellies hurt.|{n} promised to be more careful.',
]
_END = ["The end.", "And so the day ended well.", "Then they all went home.", "", "", ""]


class Told:
    """One story with the facts needed to ask about it."""

    def __init__(self, r: random.Random, w: Words, animal: str | None = None) -> None:
        name, other = w.name(), w.name()
        self.slots = {
            "n": name,
            "o": other if other != name else "Robin",
            "tr": r.choice(_TRAITS),
            "kd": r.choice(["girl", "boy", "child", "farmer", "sailor"]),
            "an": animal or r.choice(_ANIMALS),
            "t": r.choice(_THINGS),
            "a": r.choice(_ADJ),
            "a2": r.choice(_ADJ),
            "p": r.choice(_PLACES),
            "p2": r.choice(_PLACES),
            "f": r.choice(_FOOD),
        }
        parts = [r.choice(_OPEN)]
        for sentence in r.choice(_PLOTS).split(";"):
            parts.append(r.choice(sentence.split("|")))
        parts.append(r.choice(_END))
        text = " ".join(p for p in parts if p)
        while "{d}" in text:
            text = text.replace("{d}", r.choice(_DAY), 1)
        self.text = text.format(**self.slots)


def document(r: random.Random, w: Words) -> str:
    return Told(r, w).text


def generate(r: random.Random, w: Words) -> Dialogue:
    messages = system(r, 0.15)
    if r.random() < 0.6:
        animal = r.choice(_ANIMALS)
        q = fill(
            r,
            [
                "Tell me a short story about a {a}.",
                "Tell me a story with a {a}.",
                "Write a story about a {a}.",
                "I want to hear about a {a}.",
            ],
            a=animal,
        )
        return Dialogue([*messages, user(q), {"role": "assistant", "content": Told(r, w, animal).text}])
    told = Told(r, w)
    s = told.slots
    asks = [
        ("What is the name of the {kd}?", "The {kd} is called {n}."),
        ("Where does {n} live?", "{n} lives near the {p}."),
        ("What is {n} like?", "{n} is {tr}."),
    ]
    q, a = r.choice(asks)
    head = r.choice(["Read this story. ", "Here is a story: ", ""])
    return Dialogue(
        [*messages, user(head + told.text + "\n\n" + q.format(**s)), {"role": "assistant", "content": a.format(**s)}]
    )
