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
# fmt: off
_NAMES = {
    "she": [
        "Anna", "Lily", "Mia", "Rose", "Clara", "Ella", "Nora", "Ruth", "Emma", "Ida", "Alice", "Grace", "Molly",
        "Lucy", "Vera", "Jane", "Maya", "Leila", "Priya", "Yuki", "Sara", "Lucia", "Ama", "Hanna", "Julia", "Eva",
        "Marie", "Sophie",
        "Zoe", "Nina", "Laura", "Martha", "Flora", "Helen", "Tessa", "Elsa", "Amina", "Olga",
    ],
    "he": [
        "Tom", "Ben", "Sam", "Jack", "Peter", "Max", "Leo", "Finn", "Paul", "Oscar", "Hugo", "Will", "Henry", "Theo",
        "Noah", "Adam", "Daniel", "Omar", "Ravi", "Kenji", "Ali", "Carlos", "Kofi", "Jonas", "Martin", "Felix", "Simon",
        "David", "Erik", "Luke", "Oliver", "George", "Anton", "Emil", "Jacob", "Robin", "Toby", "Ivan",
    ],
}
_ANIMAL_NAMES = {
    "she": [
        "Hazel", "Willow", "Tilly", "Clover", "Fern", "Poppy", "Daisy", "Ginger", "Bella", "Juniper", "Mimi", "Luna",
        "Olive", "Penny",
    ],
    "he": [
        "Pip", "Bruno", "Moss", "Rusty", "Pepper", "Patch", "Dusty", "Nutmeg", "Bramble", "Basil", "Otto", "Barney",
        "Milo", "Hopper",
    ],
}
_ANIMALS = [
    "mouse", "rabbit", "fox", "bear", "hedgehog", "squirrel", "frog", "duck", "badger", "mole", "otter", "beaver",
    "hamster", "goat", "donkey",
]
_JOBS = [
    "baker", "farmer", "miller", "shepherd", "gardener", "tailor", "carpenter", "teacher", "painter", "clockmaker",
    "shoemaker", "woodcutter", "weaver", "potter", "beekeeper",
]
_ELDERS = {
    "child": [
        ("mother", "she"), ("father", "he"), ("grandmother", "she"), ("grandfather", "he"),
        ("aunt", "she"), ("uncle", "he"),
    ],
    "animal": [
        ("the old owl", "she"), ("the wise turtle", "he"), ("the grey goose", "she"), ("the old toad", "he"),
        ("the old heron", "he"), ("the wise old crow", "she"),
    ],
    "adult": [
        ("the old miller's wife", "she"), ("the oldest man in the village", "he"), ("the old judge", "he"),
        ("the old nurse", "she"),
    ],
}
# fmt: on
SEX_OF_NAME = {name: sex for listed in (_NAMES, _ANIMAL_NAMES) for sex, several in listed.items() for name in several}
"""Whether the pronoun of a name is `she` or `he`."""
_LATER = re.compile(
    r"\b(from (that|then)|years?|since|never|next|later|every|whenever|always|sometimes|after that|in spring)\b", re.I
)
"""A story whose end tells of later days gets no evening after it."""
QUESTION = "question"
"""Title of a document that is one question with its answer."""
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
            elif line.startswith(("start:", "?")) or (line.startswith("~") and random.random() < 0.5):
                continue
            else:
                paragraphs[-1].append(self._new(line.removeprefix("~"), values, used, random))
        text = "\n\n".join(" ".join(filter(None, lines)) for lines in paragraphs if lines)
        if values["hour"] == "day" and random.random() < 0.7 and not _LATER.search(" ".join(paragraphs[-1][-2:])):
            text = f"{text} {self._end(group, values, text, used, random)}".strip()
        if random.random() < 0.45:
            text += "".join(f"\n\n{pair}" for pair in self._questions(plot, values, text, random))
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
        """Up to three questions of the plot whose variables the story has named."""
        pairs = [split_outside(line.removeprefix("?"), "/") for line in plot.lines if line.startswith("?")]
        told = text.lower()
        known = [
            pair
            for pair in pairs
            if all(values[name].lower() in told for name in re.findall(r"\{(\w+)\}", " ".join(pair)))
        ]
        chosen = random.sample(known, min(len(known), random.randint(1, 3)))
        return [question_text(*(tidy(self._grammar.expand(part, values, random)) for part in pair)) for pair in chosen]

    def _characters(self, cast: str, random: Random) -> dict[str, str]:
        """Names, nouns and pronouns of the main character, a friend of the other sex, a third one and an elder."""
        sex = random.choice(["she", "he"])
        other = "he" if sex == "she" else "she"
        names = _ANIMAL_NAMES if cast == "animal" else _NAMES
        child = {"she": "girl", "he": "boy"}
        home = "home child" if cast == "child" else "home adult"
        if cast == "animal":
            kind, friend = random.sample(_ANIMALS, 2)
            home = f"home {kind}"
        else:
            friend = child[other]
            kind = {
                "child": child[sex],
                "adult": random.choice(_JOBS),
                "heir": {"she": "princess", "he": "prince"}[sex],
                "ruler": {"she": "queen", "he": "king"}[sex],
            }[cast]
        name, third = random.sample(names[sex], 2)
        elders = _ELDERS.get(cast, _ELDERS["adult"])
        elder, elder_sex = random.choice(elders)
        values = {"A": name, "kind": kind, "B": random.choice(names[other]), "bkind": friend, "C": third}
        values |= _PRONOUNS[sex] | {f"b{form}": word for form, word in _PRONOUNS[other].items()}
        values |= {f"e{form}": word for form, word in _PRONOUNS[elder_sex].items()}
        values |= {"eshe": values["ehe"], "eher": values["ehim"], "etitle": elder.title()}
        values["elder"] = f"{values['his']} {elder}" if cast == "child" else elder
        values |= {"trait": random.choice(self._grammar.rules["trait"]), "home_rule": home}
        return values


class FactTeller:
    """Draws texts of facts: an animal, a reason, a way to do something, or questions with answers."""

    def __init__(self, grammar: Grammar, sections: list[Section]) -> None:
        self._grammar = grammar
        lines = {section.title: section.lines for section in sections}
        names = ("name", "names", "what", "place", "food", "skill", "young", "more")
        self._animals = [dict(zip(names, _parts(line, 8), strict=True)) for line in lines["animals"]]
        self._essays = {title: [split_outside(line, "/") for line in lines[title]] for title in ("reasons", "ways")}
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
