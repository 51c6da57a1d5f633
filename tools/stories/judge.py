"""Count the faults in what a model writes: people and pronouns that no one introduced, and answers to questions.

python -m tools.stories.judge artifacts/cpu_stories         a run, a checkpoint or an exported folder
"""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from nsa_train.infer.load_model import load_model
from tools.stories.documents import SEX_OF_NAME
from tools.stories.grammar import sentences

PROMPTS = ("Once upon a time", "One day", "The", "One morning in spring,", "Long ago,", "A")
KNOWN = {
    "What do cows eat?": "grass",
    "What is a rainbow?": "colours",
    "Can a dog fly?": "no",
    "How many legs does a spider have?": "eight",
    "Where do foxes live?": "forest",
    "What colour is snow?": "white",
    "What comes after winter?": "spring",
    "Is ice warm?": "no",
    "What do bees make?": "honey",
    "What is bread made of?": "flour",
}
UNKNOWN = (
    "What is a spaceship?",
    "Who was Mandela?",
    "What is the capital of Portugal?",
    "How does a dishwasher work?",
    "What is a bitcoin?",
    "Where do pandas and lemurs live?",
    "What is marmalade?",
    "How tall is the Eiffel Tower?",
    "Can a squid sing?",
    "Why is marzipan so sweet?",
)
"""Questions that no document asks and whose names none has."""
DECLINED = "I do not know"

_SEXES = {
    "she": (
        "her",
        "she|her|hers|herself",
        "girl|woman|(?:grand)?mother|aunt|sister|queen|princess|wife|owl|goose|nurse",
    ),
    "he": ("his", "he|him|his|himself", "boy|man|(?:grand)?father|uncle|brother|king|prince|turtle|toad|heron|judge"),
}
_OWN = {sex: own for sex, (own, _, _) in _SEXES.items()}
_PRONOUN = {sex: re.compile(rf"\b(?:{words})\b", re.I) for sex, (_, words, _) in _SEXES.items()}
_PERSON = {sex: re.compile(rf"\b(?:{words})s?\b", re.I) for sex, (_, _, words) in _SEXES.items()}
_STRANGER = re.compile(r"\bthe [a-z ]*?(?:er|or|man|herd|smith|cook)\b", re.I)
"""Somebody whose pronoun may be either."""
_RELATIVES = "mother|father|grandmother|grandfather|aunt|uncle"
_RELATIVE = re.compile(rf"\b(his|her) ({_RELATIVES})\b", re.I)
_SPEAKER = re.compile(rf"\b(?:said|asked|called) (?:his|her) ({_RELATIVES})\b")
_NAMED = re.compile(r"\b(girl|boy|princess|prince|queen|king)(?: named|'s name was) ([A-Z][a-z]+)")


def faults(story: str, sex_of_name: Mapping[str, str] = SEX_OF_NAME) -> tuple[list[str], int]:
    """What is wrong in a story, and how many sentences it has.

    A story is about one person, with a friend of the other sex, perhaps a third one, and one relative who speaks. A
    sentence is at fault if it names somebody else, lets another relative speak, says `his` of a relative of a girl,
    calls a boy `Anna`, or has a pronoun of a sex that neither the main person nor anybody in the last sentences has.
    """
    lines, wrong = sentences(story), []
    people: list[str] = []
    recent: list[set[str]] = []
    speaker = ""
    for line in lines:
        names = [word for word in dict.fromkeys(re.findall(r"[A-Za-z]+", line)) if word in sex_of_name]
        for name in names:
            sex = sex_of_name[name]
            room = 2 if not people or sex_of_name[people[0]] == sex else 1
            if name not in people and [sex_of_name[other] for other in people].count(sex) < room:
                people.append(name)
        sexes = {sex_of_name[name] for name in names}.union(sex for sex in _PERSON if _PERSON[sex].search(line))
        recent = [*recent[-5:], sexes]
        speakers = _SPEAKER.findall(line)
        speaker = speaker or "".join(speakers[:1])
        faulty = [name for name in names if name not in people]
        faulty += [relative for relative in speakers if relative != speaker]
        faulty += [
            f"{noun} named {name}"
            for noun, name in _NAMED.findall(line)
            if name in sex_of_name and not _PERSON[sex_of_name[name]].fullmatch(noun)
        ]
        if people:
            hero = sex_of_name[people[0]]
            near = set().union({hero}, *recent)
            faulty += [
                f"{whose} {relative}" for whose, relative in _RELATIVE.findall(line) if whose.lower() != _OWN[hero]
            ]
            if not _STRANGER.search(line):
                faulty += [sex for sex in _PRONOUN if sex not in near and _PRONOUN[sex].search(line)]
        if faulty:
            wrong.append(f"{', '.join(faulty)}: {line}")
    return wrong, len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a run, a checkpoint or an exported folder")
    parser.add_argument("--stories", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--print", type=int, default=0, metavar="N", dest="shown", help="print the first N stories")
    args = parser.parse_args()
    loaded = load_model(args.model, device="cpu")
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(args.stories)]
    texts = loaded.generate(prompts, max_new_tokens=220, temperature=0.5, top_p=0.95, seed=args.seed)
    stories = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    results = [faults(story) for story in stories]
    for story, (wrong, _) in list(zip(stories, results, strict=True))[: args.shown]:
        print("\n".join([story, *(f"  ! {line}" for line in wrong), ""]))
    n_wrong, lines = sum(len(wrong) for wrong, _ in results), sum(number for _, number in results)
    whole = sum(not wrong for wrong, _ in results)
    print(f"{whole} of {len(stories)} stories have no fault; {n_wrong} of {lines} sentences ({n_wrong / lines:.1%}) do")
    asked = [f"{question}\n" for question in (*KNOWN, *UNKNOWN)]
    answers = loaded.generate(asked, max_new_tokens=30, temperature=0.0)
    for question, answer in zip(asked, answers, strict=True):
        print(f"  {question.strip()}  {answer.partition(chr(10))[0]}")
    right = sum(word in answer.lower() for word, answer in zip(KNOWN.values(), answers, strict=False))
    declined = sum(answer.startswith(DECLINED) for answer in answers[len(KNOWN) :])
    print(f"{right} of {len(KNOWN)} known questions answered, {declined} of {len(UNKNOWN)} unknown ones declined")


if __name__ == "__main__":
    main()
