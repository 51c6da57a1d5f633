"""The story corpus: the same for a seed, correct in form, varied, and in the columns of the shipped corpus."""

import re
import sys
from itertools import islice
from random import Random

import pyarrow.parquet as pq
import pytest

from nsa_train.shipped import CORPUS
from tools.stories import __main__ as program
from tools.stories import documents as teller
from tools.stories import judge
from tools.stories.grammar import Grammar, sentences, split_outside, tidy

NUMBER = 2000
FACTS = {"animals", teller.QUESTION, "reasons", "ways"}
QUESTIONS = re.compile(r"\n\n(?=[^\n]+\?\n)")
"""Before each question that follows a text."""
WRONG = {
    "markup that was not expanded": r"[\[\]{}<>|~_]",
    "article before a vowel": r"\b[Aa] (?!us|uni|one\b)[aeiou]",
    "article before a consonant": r"\b[Aa]n (?!honest|hour)[^aeiou]",
    "two articles": r"\b([Tt]he|[Aa]n?) (the|an?|his|her)\b",
    "word repeated": r"\b(he|she|the|and|was|to|of|a|his|her) \1\b",
    "space before a mark": r" [,.!?]",
    "two marks": r"[,.!?]{2}|[.!?]\"[.,]",
    "sentence without a capital": r"[.!?] \"?[a-z]",
    "no space after a mark": r"[.,!?][A-Za-z]",
    "number with a singular": r"\b(?:two|three|four|five|six|seven|ten|twelve) (?:step|day|piece|coin|hen|stone)\b",
    "plural after was": r"\bwas (?:no )?(?:eggs|noodles|pancakes|roast potatoes|honey cakes|cinnamon rolls)\b",
    "present form in a tale": r"\b(?:he|she) (?:goes|runs|sees|says|walks)\b",
}


@pytest.fixture(scope="module")
def dropped():
    return []


@pytest.fixture(scope="module")
def corpus(dropped):
    """Documents of one seed; `dropped` has the lines of plots that repeated a sentence at every attempt."""
    original = teller.StoryTeller._new

    def new(self, template, *rest):
        text = original(self, template, *rest)
        if not text:
            dropped.append(template)
        return text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teller.StoryTeller, "_new", new)
        return list(islice(teller.documents(Random(3)), NUMBER))


def test_a_seed_gives_the_same_documents_and_another_seed_others(corpus):
    assert list(islice(teller.documents(Random(3)), 50)) == corpus[:50]
    assert list(islice(teller.documents(Random(4)), 50)) != corpus[:50]


@pytest.mark.parametrize("fault", WRONG)
def test_form(corpus, fault):
    """The marks of dialogue and questions count as text of their own."""
    wrong = re.compile(WRONG[fault])
    stories_only = fault == "present form in a tale"
    hits = [
        text[max(0, hit.start() - 30) : hit.end() + 30]
        for title, text in corpus
        if not (stories_only and title in FACTS)
        for hit in wrong.finditer(text)
    ]
    assert hits == []


def test_no_line_of_a_plot_is_lost_and_no_sentence_comes_twice_in_a_story(corpus, dropped):
    assert dropped == []
    for title, text in corpus:
        if title not in FACTS:
            lines = sentences(QUESTIONS.split(text)[0])
            assert len(set(lines)) == len(lines), text
            assert 8 <= len(lines) <= 60, text


def test_documents_share_few_sentences(corpus):
    texts = [text for title, text in corpus if title != teller.QUESTION]
    assert len(set(texts)) == len(texts) > NUMBER / 2
    assert program.distinct_share(sentence for text in texts for sentence in sentences(text)) > 0.6
    assert program.distinct_share(gram for text in texts for gram in program.five_grams(text)) > 0.35
    words = {word for text in texts for word in re.findall(r"[a-z]+", text.lower())}
    assert 1500 < len(words) < 3000
    assert len({title for title, _ in corpus} - FACTS) >= 30
    assert sum(text.startswith("Once upon a time") for text in texts) > NUMBER / 20
    assert sum(text.startswith("The ") for text in texts) > NUMBER / 20


def test_an_answer_names_only_what_the_story_told(corpus):
    """Names of people and the words of the question's thing."""
    asked = 0
    for title, text in corpus:
        story, *pairs = QUESTIONS.split(text)
        if title not in FACTS:
            for pair in pairs:
                asked += 1
                question, answer = pair.split("\n")
                assert question.endswith("?")
                assert answer.endswith((".", "!", '"')), answer
                for name in re.findall(r"(?<!^)(?<![.!?] )\b[A-Z][a-z]+", answer):
                    assert name in story, text
    assert asked > NUMBER / 6


def test_the_pronoun_of_a_main_character_is_the_same_throughout():
    grammar = Grammar()
    grammar.read(teller.HERE / "words.txt")
    tellers = teller.StoryTeller(grammar, grammar.read(teller.HERE / "plots.txt"))
    for seed in range(40):
        people = tellers._characters("child", Random(seed))
        girl = teller.SEX_OF_NAME[people["A"]] == "she"
        assert (people["he"], people["himself"], people["kind"]) == (
            ("she", "herself", "girl") if girl else ("he", "himself", "boy")
        )
        assert (people["bhe"], people["bkind"]) == (("he", "boy") if girl else ("she", "girl"))
        assert people["C"] != people["A"]
        assert teller.SEX_OF_NAME[people["C"]] == teller.SEX_OF_NAME[people["A"]] != teller.SEX_OF_NAME[people["B"]]


def test_a_name_belongs_to_one_person():
    """Whoever reads a name knows the pronoun, the friend and the elder."""
    heroes, sexes = [], {}
    for cast in teller._CASTS.values():
        for sex, lines in cast.items():
            for line in lines:
                names = [person.partition(" the ")[0] for person in line.split(", ")[:3]]
                heroes.append(names[0])
                for name, own in zip(names, (sex, {"she": "he", "he": "she"}[sex], sex), strict=True):
                    assert sexes.setdefault(name, own) == own, name
    assert len(set(heroes)) == len(heroes)
    assert sexes == teller.SEX_OF_NAME


def test_a_story_stays_with_its_people(corpus):
    """No fault that the judge knows stands in a text that it judges a model by."""
    told = [QUESTIONS.split(text)[0] for title, text in corpus if title not in FACTS]
    assert [fault for story in told for fault in judge.faults(story)[0]] == []


@pytest.mark.parametrize(
    ("story", "fault"),
    [
        ("Anna met Ben. Then Tom laughed.", "Tom"),
        ("Anna met Julia. Then Eva laughed.", "Eva"),
        ("There was a boy named Anna.", "boy named Anna"),
        ("Anna could not sleep. He had packed a bag.", "he"),
        ("Tom saw a hen. She went home.", "she"),
        ("Anna met Ben. His grandmother smiled.", "His grandmother"),
        ('"Go," said her mother to Anna. "Well," said her uncle.', "uncle"),
        ("Anna met Ben. She gave him a nut, and her mother laughed.", None),
        ("Tom met the baker, who put her tray down.", None),
    ],
)
def test_the_judge_names_the_fault(story, fault):
    wrong, lines = judge.faults(story)
    assert lines == len(sentences(story))
    assert [line.partition(": ")[0] for line in wrong] == ([fault] if fault else [])


def test_unknown_questions_are_declined_and_those_of_the_judge_are_new(corpus):
    asked = {question for title, text in corpus if title == teller.QUESTION for question in [text.partition("\n")[0]]}
    declined = [text for title, text in corpus if title == teller.QUESTION and judge.DECLINED in text]
    assert NUMBER / 30 < len(declined) < NUMBER / 6
    assert len({text.partition("\n")[0] for text in declined}) > 0.7 * len(declined)
    assert asked.isdisjoint(judge.UNKNOWN)
    facts = (teller.HERE / "facts.txt").read_text(encoding="utf-8").lower()
    for question in judge.UNKNOWN:
        assert any(word not in facts for word in re.findall(r"[a-z]+", question.lower())), question


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("a owl saw a unicorn and a honest man", "An owl saw a unicorn and an honest man"),
        ('the end. "a apple?" asked tom. he  ran', 'The end. "An apple?" asked tom. He ran'),
    ],
)
def test_tidy(text, result):
    assert tidy(text) == result


def test_rules_are_expanded_anew_and_variables_once(tmp_path):
    file = tmp_path / "small.txt"
    file.write_text("<colour>\n  red\n  blue\nhat = a [<colour>|<colour>] hat\n== plot\nthe = x / [a/b] | y\n")
    with pytest.raises(ValueError, match="the needs 1 parts"):
        Grammar().read(file)
    file.write_text("<colour>\n  red\n  blue\nhat = a <colour> hat\n== plot\nlast line\n")
    grammar = Grammar()
    (section,) = grammar.read(file)
    assert section.lines == ["last line"]
    random, seen = Random(1), set()
    for _ in range(40):
        values = grammar.bind(section, {}, random)
        text = grammar.expand("{hat}, {the_hat}, <colour>", values, random)
        first, second, colour = text.split(", ")
        assert second == first.replace("a ", "the ", 1)
        seen.add((first, colour))
    assert len(seen) == 4
    assert split_outside("one [a / b] / two", "/") == ["one [a / b]", "two"]


def test_the_file_has_the_columns_of_the_shipped_corpus(tmp_path, monkeypatch, capsys):
    out = tmp_path / "stories.parquet"
    monkeypatch.setattr(sys, "argv", ["stories", str(out), "--documents", "200", "--seed", "5", "--print", "2"])
    program.main()
    assert capsys.readouterr().out.count("--- ") == 2
    table = pq.read_table(out)
    assert table.schema.equals(pq.read_schema(CORPUS))
    texts = table["text"].to_pylist()
    assert len(texts) == 200
    assert 90_000 < sum(map(len, texts)) < 300_000
    assert out.stat().st_size < 70_000
