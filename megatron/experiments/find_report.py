"""The steps at which a run has read a text (`tools/replay.py --find`), as an object for JSON and as text."""

import itertools
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.data.indexed_dataset import IndexedDataset
from megatron.experiments.errors import RunError
from megatron.experiments.find_text import TextSearch
from megatron.experiments.run import Run
from megatron.experiments.sightings import sightings
from megatron.process.progress import ProgressBar


def find_text(run: Run, text: str, limit: int, logger: logging.Logger) -> dict[str, Any]:
    """Returns all places of a text in a run's training data, with the steps that have read each, for JSON.

    limit: most places to look for; `complete` tells whether these are all.
    """
    last = run.last_step
    if last < 1:
        raise RunError(f"{run.path}: has taken no step yet, so it has read nothing")
    data = run.data(last)
    search, is_complete = TextSearch(text, data.tokenizer), True
    places: list[dict[str, Any]] = []
    for source in dict.fromkeys(data.sources):  # a path that is listed twice has several members
        numbers = [number for number, name in enumerate(data.sources) if name == source]
        member = data.members[numbers[0]]
        indexed = member.indexed
        assert isinstance(indexed, IndexedDataset)
        with ProgressBar(f"searching {source}", int(indexed.sizes.sum()), "token", logger, visible=True) as bar:
            left = limit - len(places)
            occurrences = list(itertools.islice(search.occurrences(indexed, bar.advance_to), left + 1))
        is_complete &= len(occurrences) <= left
        occurrences = occurrences[:left]
        sightings_of = [sightings(data, number, occurrences, last) for number in numbers]
        for occurrence, *copies in zip(occurrences, *sightings_of, strict=True):
            sighted = sorted(itertools.chain(*copies), key=lambda sighting: (sighting.step, sighting.row))
            places.append({
                "source": source, "document": occurrence.document, "offset": occurrence.offset,
                "tokens": occurrence.count, "seen": [vars(sighting) for sighting in sighted],
            })  # fmt: skip
        if not is_complete:
            break
    return {
        "run": str(run.path), "text": text, "tokens": search.ids, "tokens_after_space": search.spaced_ids,
        "last_step": last, "complete": is_complete, "places": places,
    }  # fmt: skip


def text_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines that show what `find_text` has returned."""
    yield f"{result['text']!r}: tokens {result['tokens']} alone, {result['tokens_after_space']} after a space"
    read = [place for place in result["places"] if place["seen"]]
    for place in read:
        start, end = place["offset"], place["offset"] + place["tokens"]
        yield f"{place['source']}, document {place['document']}, tokens {start} to {end - 1}:"
        for row in place["seen"]:
            share = "" if row["count"] == place["tokens"] else f", {row['count']} of its {place['tokens']} tokens"
            yield f"  step {row['step']}, row {row['row']}, from place {row['place']}{share}"
    yield f"{len(result['places'])} places in documents, {len(read)} of them read up to step {result['last_step']}"
    if not result["complete"]:
        yield "there are more places; --limit allows no more"
