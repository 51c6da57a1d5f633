"""Documents of the story corpus: a plot with characters, or a text of facts, one after another."""

import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tools.stories.grammar import Grammar, Section, draw_new, split_outside, tidy

HERE = Path(__file__).parent
_PRONOUNS = {
    "she": {"he": "she", "him": "her", "his": "her", "himself": "herself"},
    "he": {"he": "he", "him": "him", "his": "his", "himself": "himself"},
}
# A name belongs to one person: the sex, the kind, the friends and the elder of a story follow from who it is about.
# Each line: hero, friend of the other sex, third one of the hero's sex, elder.
# fmt: off
_CASTS = {
    "child": {
        "she": [
            "Anna, Ben, Julia, grandmother", "Lily, Sam, Julia, father", "Mia, Max, Eva, grandfather",
            "Clara, Ben, Eva, mother", "Nora, Sam, Julia, uncle", "Lucy, Max, Eva, aunt",
        ],
        "he": [
            "Tom, Emma, Paul, mother", "Jack, Molly, Paul, grandfather", "Peter, Alice, David, grandmother",
            "Leo, Emma, David, father", "Oscar, Molly, Paul, aunt", "Hugo, Alice, David, uncle",
        ],
    },
    "adult": {
        "she": [
            "Martha the baker, Ben, Ruth, the old judge", "Helen the teacher, Sam, Ruth, the old nurse",
            "Flora the gardener, Max, Ruth, the oldest man in the village",
            "Vera the weaver, Ben, Ruth, the old judge",
        ],
        "he": [
            "Martin the miller, Emma, Jacob, the old nurse",
            "George the carpenter, Molly, Jacob, the old judge",
            "Anton the clockmaker, Alice, Jacob, the oldest man in the village",
            "Simon the shepherd, Emma, Jacob, the old nurse",
        ],
    },
    "heir": {
        "she": ["Sophie the princess, Ben, Ruth, the old nurse", "Marie the princess, Sam, Ruth, the old judge"],
        "he": ["Felix the prince, Emma, Jacob, the old nurse", "Daniel the prince, Molly, Jacob, the old judge"],
    },
    "ruler": {
        "she": ["Elsa the queen, Ben, Ruth, the old judge", "Sara the queen, Sam, Ruth, the old nurse"],
        "he": ["Henry the king, Emma, Jacob, the old judge", "Emil the king, Molly, Jacob, the old nurse"],
    },
    "animal": {
        "she": [
            "Tilly the mouse, Bruno the badger, Hazel, the old toad",
            "Bella the rabbit, Moss the frog, Hazel, the grey goose",
            "Luna the squirrel, Bruno the badger, Hazel, the old owl",
            "Mimi the duck, Moss the frog, Hazel, the wise turtle",
        ],
        "he": [
            "Pip the hedgehog, Willow the otter, Dusty, the old owl",
            "Otto the fox, Penny the goat, Dusty, the wise turtle",
            "Milo the mole, Willow the otter, Dusty, the old heron",
            "Barney the bear, Penny the goat, Dusty, the grey goose",
        ],
    },
}
ELDERS = {
    "she": [
        "mother", "grandmother", "aunt", "the old owl", "the grey goose", "the old nurse",
    ],
    "he": [
        "father", "grandfather", "uncle", "the wise turtle", "the old toad", "the old heron", "the old judge",
        "the oldest man in the village",
    ],
}
# fmt: on
SEX_OF_NAME = {
    person.partition(" the ")[0]: sex if place != 1 else {"she": "he", "he": "she"}[sex]
    for cast in _CASTS.values()
    for sex, lines in cast.items()
    for line in lines
    for place, person in enumerate(line.split(", ")[:3])
}
"""Whether the pronoun of each name is `she` or `he`."""
_LATER = re.compile(
    r"\b(from (that|then)|years?|since|never|next|later|every|whenever|always|sometimes|after that|in spring)\b", re.I
)
"""A story whose end tells of later days gets no evening after it."""
QUESTION = "question"
"""Title of a document that is one question with its answer."""
_REQUESTS = ("Tell me a story.", "Tell me a story about {A}.", "Tell me a story about a {kind}.")
"""What a person types to get a story."""
_OPENINGS = ("story", "story", "weather", "when", "when")


class StoryTeller:
    """Draws stories of the plots."""

    def __init__(self, grammar: Grammar, plots: list[Section]) -> None:
        self._grammar, self._plots = grammar, plots

    def story(self, random: Random) -> tuple[str, str]:
        """A plot with all that varies drawn anew: its title and its text."""
        plot = random.choice(self._plots)
        cast = random.choice(plot.definitions[("cast",)])[0]
        values = self._grammar.bind(plot, self._characters(cast, random), random)
        values["who"] = self._grammar.expand("<who>", values, random)
        group = "ruler" if cast == "heir" else cast
        used: set[str] = set()
        paragraphs = [[self._opening(plot, values, group, used, random)]]
        for line in plot.lines:
            if line == "--":
                paragraphs.append([])
            elif line.startswith(("start:", "?")) or (line.startswith("~") and random.random() < 0.8):
                continue
            else:
                paragraphs[-1].append(self._new(_named(line.removeprefix("~")), values, used, random))
        text = "\n\n".join(" ".join(filter(None, lines)) for lines in paragraphs if lines)
        if values["hour"] == "day" and random.random() < 0.4 and not _LATER.search(" ".join(paragraphs[-1][-2:])):
            text = f"{text} {self._end(group, values, text, used, random)}".strip()
        if random.random() < 0.3:
            text += "".join(f"\n\n{pair}" for pair in self._questions(plot, values, text, random))
        if random.random() < 0.06:
            text = f"{random.choice(_REQUESTS).format(**values)}\n{text}"
        return plot.title, text

    def _new(self, template: str, values: dict[str, str], used: set[str], random: Random) -> str:
        return draw_new(lambda: tidy(self._grammar.expand(template, values, random)), used)

    def _opening(self, plot: Section, values: dict[str, str], group: str, used: set[str], random: Random) -> str:
        """Who and where, the weather, or at once what happens; then the clause that starts the plot."""
        start = next(line for line in plot.lines if line.startswith("start:")).removeprefix("start:").strip()
        when = "<when {hour}>"
        form = random.choice(_OPENINGS)
        if form == "story":
            first, values = f"<opening {group}>", values | {"who": values["A"]}
        elif form == "weather":
            first = "<weather {weather}>"
        else:
            first = ""
        if form == "weather" and random.random() < 0.5:
            return self._new(f"{first} {start}.", values, used, random)
        return self._new(f"{first} {when}, {start}.", values, used, random)

    def _end(self, group: str, values: dict[str, str], text: str, used: set[str], random: Random) -> str:
        """A last sentence that names no place which is new, and no meal or drink which the story has had."""
        unfit = [values[name] for name in ("landmark", "landmark2", "landmark3") if values[name] not in text]
        unfit += [values[name] for name in ("food", "drink") if values[name] in text]

        def draw() -> str:
            end = tidy(self._grammar.expand(f"<end {group}>", values, random))
            return "" if any(words in end for words in unfit) else end

        return draw_new(draw, used)

    def _questions(self, plot: Section, values: dict[str, str], text: str, random: Random) -> list[str]:
        """Up to two questions of the plot whose variables the story has named."""
        pairs = [split_outside(line.removeprefix("?"), "/") for line in plot.lines if line.startswith("?")]
        told = text.lower()
        known = [
            pair
            for pair in pairs
            if all(values[name].lower() in told for name in re.findall(r"\{(\w+)\}", " ".join(pair)))
        ]
        chosen = random.sample(known, min(len(known), random.randint(1, 2)))
        return [question_text(*(tidy(self._grammar.expand(part, values, random)) for part in pair)) for pair in chosen]

    def _characters(self, cast: str, random: Random) -> dict[str, str]:
        """Names, nouns and pronouns of the main character, a friend of the other sex, a third one and an elder."""
        sex = random.choice(["she", "he"])
        other = "he" if sex == "she" else "she"
        hero, friend, third, elder = random.choice(_CASTS[cast][sex]).split(", ")
        child = {"she": "girl", "he": "boy"}
        name, _, kind = hero.partition(" the ")
        friend, _, friend_kind = friend.partition(" the ")
        elder_sex = next(sex for sex, elders in ELDERS.items() if elder in elders)
        values = {"A": name, "kind": kind or child[sex], "B": friend, "bkind": friend_kind or child[other], "C": third}
        values |= _PRONOUNS[sex] | {f"b{form}": word for form, word in _PRONOUNS[other].items()}
        values |= {f"e{form}": word for form, word in _PRONOUNS[elder_sex].items()}
        values |= {"eshe": values["ehe"], "eher": values["ehim"], "etitle": elder.title()}
        values["elder"] = f"{values['his']} {elder}" if cast == "child" else elder
        home = {"child": "home child", "animal": f"home {kind}"}.get(cast, "home adult")
        values |= {"trait": random.choice(self._grammar.rules["trait"]), "home_rule": home}
        return values


def _named(line: str) -> str:
    """A line that starts with the main character's pronoun starts with the name, so that the name stays near."""
    return re.sub(r"^ ?\{he\} ", "{A} ", line)


class FactTeller:
    """Draws texts of facts: an animal, a reason, a way to do something, or questions with answers."""

    def __init__(self, grammar: Grammar, sections: list[Section]) -> None:
        self._grammar = grammar
        lines = {section.title: section.lines for section in sections}
        names = ("name", "names", "what", "place", "food", "skill", "young", "more")
        self._animals = [dict(zip(names, _parts(line, 8), strict=True)) for line in lines["animals"]]
        self._essays = {title: [split_outside(line, "/") for line in lines[title]] for title in ("reasons", "ways")}
        self._unknown = lines["unknown"]
        self._pairs: list[tuple[str, tuple[str, ...]]] = [
            (question, (answer,)) for question, answer in (_parts(line, 2) for line in lines["questions"])
        ]
        for title, article in (("things", "a "), ("substances", "")):
            for line in lines[title]:
                name, what, second, *pair = line.split("; ")
                self._pairs.append((f"What is {article}{name}?", (f"{article}{name} is {what}.", second)))
                if pair:
                    self._pairs.append((pair[0], (pair[1],)))

    def animal(self, random: Random) -> tuple[str, str]:
        values = random.choice(self._animals)
        rules = ["food", "skill", "young", "more"]
        random.shuffle(rules)
        rules = ["first", *rules[: random.randint(3, 4)]]
        text = tidy(" ".join(self._grammar.expand(f"<animal {rule}>", values, random) for rule in rules))
        if random.random() < 0.4:
            text += f"\n\n{self._animal_question(values, random)}"
        return "animals", text

    def _animal_question(self, values: dict[str, str], random: Random) -> str:
        question, answer = split_outside(self._grammar.expand("<animal question>", values, random), "/")
        return question_text(tidy(question), tidy(answer))

    def question(self, random: Random) -> tuple[str, str]:
        """One question, so that an answer ends with the document; the answer has one sentence or two."""
        if random.random() < 0.25:
            texts = (
                self._grammar.expand(text, {}, random) for text in (random.choice(self._unknown), "<unknown answer>")
            )
            return QUESTION, question_text(*map(tidy, texts))
        if random.random() < 0.25:
            return QUESTION, self._animal_question(random.choice(self._animals), random)
        question, answer = random.choice(self._pairs)
        return QUESTION, question_text(tidy(question), tidy(" ".join(answer[: random.randint(1, len(answer))])))

    def essay(self, random: Random) -> tuple[str, str]:
        """A title and its sentences; a reason is sometimes an answer."""
        kind = random.choice(list(self._essays))
        title, *parts = random.choice(self._essays[kind])
        text = tidy(" ".join(self._grammar.expand(part, {}, random) for part in parts))
        return kind, question_text(title, text) if kind == "reasons" and random.random() < 0.5 else f"{title}\n\n{text}"


def _parts(line: str, number: int) -> list[str]:
    parts = line.split("; ")
    if len(parts) != number:
        raise ValueError(f"a line of facts.txt needs {number} parts between semicolons, not {len(parts)}: {line}")
    return parts


def question_text(question: str, answer: str) -> str:
    """A question as a person types it, and its answer on the next line."""
    return f"{question}\n{answer}"


def documents(random: Random) -> Iterator[tuple[str, str]]:
    """Titles and texts, without end: the same for the same state of `random`. Only single questions come again."""
    grammar = Grammar()
    grammar.read(HERE / "words.txt")
    stories = StoryTeller(grammar, grammar.read(HERE / "plots.txt"))
    facts = FactTeller(grammar, grammar.read(HERE / "facts.txt"))
    kinds = {stories.story: 50, facts.question: 40, facts.animal: 6, facts.essay: 4}
    written = set()
    while True:
        title, text = random.choices([*kinds], [*kinds.values()])[0](random)
        if title == QUESTION or text not in written:
            written.add(text)
            yield title, text
