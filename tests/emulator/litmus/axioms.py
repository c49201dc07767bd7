"""The axioms of the PTX memory model for small programs of relaxed, acquire and release operations on whole words.

A program is a tuple of threads, each a tuple of (kind, word, value, sem): "write", an exchange whose result nobody
uses, of a value that occurs once; or "read". These are strong and of one scope, so they are morally strong to each
other, and all writes are read-modify-writes: what is read in a word is observed together with all that came before it
there. "store" and "load" are weak, of words of their own; they may race.
"""

from itertools import permutations, product

Event = tuple[int, int]  # thread, and place in it; (-1, word): what the word holds at first
Pairs = set[tuple[Event, Event]]


def closed(pairs: Pairs) -> Pairs:
    """The transitive closure."""
    pairs = set(pairs)
    while more := {(a, d) for a, b in pairs for c, d in pairs if b == c} - pairs:
        pairs |= more
    return pairs


def executions(program) -> set[tuple[tuple[int, ...], bool]]:
    """All that the axioms allow: the values of strong reads, thread by thread, then those that strong words end with,
    and whether weak accesses race."""
    events = {(t, i): op for t, thread in enumerate(program) for i, op in enumerate(thread)}
    words = sorted({op[1] for op in events.values() if op[0] in ("write", "read")})
    writes = {w: [e for e, op in events.items() if op[0] == "write" and op[1] == w] for w in words}
    reads = [e for e, op in events.items() if op[0] == "read"]
    value = {e: op[2] for e, op in events.items()} | {(-1, w): 0 for w in words}
    order = {(a, b) for a in events for b in events if a[0] == b[0] and a[1] < b[1]}
    found = set()
    for chains in product(*(permutations(writes[w]) for w in words)):
        chain = {w: [(-1, w), *made] for w, made in zip(words, chains, strict=True)}
        for sources in product(*(chain[events[r][1]] for r in reads)):
            base = base_causality(events, order, chain, dict(zip(reads, sources, strict=True)))
            if base is not None:
                outcome = (*(value[s] for s in sources), *(value[chain[w][-1]] for w in words))
                found.add((outcome, races(events, base)))
    return found


def races(events, base: Pairs) -> bool:
    """Whether two weak accesses of one word, one of them a store, are not ordered."""
    weak = [e for e, op in events.items() if op[0] in ("store", "load")]
    return any(
        a < b
        and events[a][1] == events[b][1]
        and "store" in (events[a][0], events[b][0])
        and not {(a, b), (b, a)} & base
        for a in weak
        for b in weak
    )


def base_causality(events, order: Pairs, chain, source) -> Pairs | None:
    """The base causality order of an execution, None if the execution is not allowed.

    `chain`: the coherence order of each word, `source`: what each read returns.
    """
    place = {e: i for made in chain.values() for i, e in enumerate(made)}
    word = {e: w for w, made in chain.items() for e in made} | {r: events[r][1] for r in source}
    coherence = {(a, b) for made in chain.values() for i, a in enumerate(made) for b in made[i + 1 :]}
    observed = {(w, r) for r, s in source.items() for w in chain[word[r]][: place[s] + 1]}
    synchronizes = {
        (w, r)
        for w, r in observed
        if w[0] >= 0 and w[0] != r[0] and events[w][3] == "release" and events[r][3] == "acquire"
    }
    first = {((-1, w), e) for w in chain for e in events}  # words are made before all else
    base = closed(order | synchronizes) | first
    causality = base | {(w, y) for w, r in observed for x, y in base if x == r}
    if any(a == b for a, b in causality):
        return None
    for a, b in causality:
        if a in place and b in place and word[a] == word[b] and place[a] >= place[b]:
            return None  # coherence
        if a in source and source[a] == b:
            return None  # causality 1
        if a in place and b in source and word[a] == word[b] and place[source[b]] < place[a]:
            return None  # causality 2
    reads_from = {(s, r) for r, s in source.items()}
    from_reads = {(r, w) for r, s in source.items() for w in chain[word[r]][place[s] + 1 :]}
    local = {(a, b) for a, b in order if a in word and b in word and word[a] == word[b]}
    if any(a == b for a, b in closed(local | reads_from | from_reads | coherence)):
        return None  # sequential consistency per location
    return base
