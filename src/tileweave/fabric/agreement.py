"""Whether the ranks of a group have come for the same thing, and what differs if they have not."""

from collections.abc import Hashable, Mapping, Sequence

ALIKE = "the ranks of a group must make the same calls in the same order"
Facts = dict[str, str]


def facts_of(label: Hashable) -> Facts:
    """What a rank has come for, as text by name; "call" is its name. Labels with a method `facts` say it themselves."""
    facts = getattr(label, "facts", None)
    return facts() if facts else {"call": str(label)}


def check_labels(labels: Sequence[Hashable]) -> None:
    """Raise RuntimeError unless all ranks have come for the same thing."""
    if len(set(labels)) > 1:
        check_facts([facts_of(label) for label in labels])


def check_facts(facts: Sequence[Facts]) -> None:
    """Raise RuntimeError, with what differs, unless the facts of all ranks, in rank order, are the same."""
    if any(each != facts[0] for each in facts):
        raise RuntimeError(f"{ALIKE}, but {difference(dict(enumerate(facts)))}")


def difference(of_rank: Mapping[int, Facts]) -> str:
    """What differs between ranks, each value with the ranks that have it; of calls of one name only what is unlike."""
    if len({facts["call"] for facts in of_rank.values()}) > 1:
        return f"the {_values('call', of_rank)}"
    name = next(iter(of_rank.values()))["call"]
    words = dict.fromkeys(word for facts in of_rank.values() for word in facts)
    unlike = [word for word in words if len({facts.get(word) for facts in of_rank.values()}) > 1]
    return f"{name} differs: " + "; ".join(_values(word, of_rank) for word in unlike)


def _values(word: str, of_rank: Mapping[int, Facts]) -> str:
    having: dict[str, list[int]] = {}
    for rank, facts in of_rank.items():
        having.setdefault(facts.get(word, "none"), []).append(rank)
    return f"{word} is " + ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in having.items())


def _ranks(ranks: Sequence[int]) -> str:
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
