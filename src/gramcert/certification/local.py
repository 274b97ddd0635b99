"""Radii by minorants: which pairs of inputs and classes are worth a search, and in which portions."""

import hashlib
import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gramcert.auditing.certificate import node_facts
from gramcert.auditing.strict_json import canonical
from gramcert.files import BadFile, read_npz, write_atomically
from gramcert.minorants.backward import Multipliers, Pairs
from gramcert.minorants.layout import Centre, Layout, widened
from gramcert.minorants.proof import prove
from gramcert.minorants.search import Search
from gramcert.operators.graph import Graph
from gramcert.operators.network import Network
from gramcert.progress import Report, silent
from gramcert.rounding import checked_arithmetic

# Changes whenever a search could not use what an earlier version left.
FORMAT = "gramcert minorants 1"

# Entries of all values of a network, times pairs, that are searched at once: about 300 MB; and of one pair alone.
PORTION, MOST_ENTRIES = 2**21, 2**24

# A search is tried on so many pairs. It goes on if it lifts so large a share of their radii by so large a factor.
TRIAL, WORTH, SHARE = 32, 1.01, 0.1

# It is given up halfway if it does not even lift that share to this part of what is known: in the second half, where
# steps become small, radii were seen to grow by at most 6 per cent.
HOPELESS = 0.8


@dataclass(frozen=True)
class Proved:
    """Radii of pairs, and the multipliers that prove them."""

    pairs: Pairs
    radii: Tensor
    multipliers: Multipliers


@dataclass
class LocalBounds:
    """A network made ready for minorants around any input.

    Attributes:
        note: why nothing more was tried, for people.
    """

    call: str
    layout: Layout
    network: Network
    steps: int
    jobs: int
    folder: Path | None
    is_written: bool
    note: str = ""
    _search: Search = field(init=False)
    _key: bytes = field(init=False)
    _is_tried: bool = False

    def __post_init__(self) -> None:
        self._search = Search(self.layout)
        facts = canonical([node_facts(node) for node in self.layout.nodes.values()])
        self._key = f"{FORMAT} {self.steps} {facts}".encode()
        if self.layout.entries > MOST_ENTRIES:
            self.note = f"its values have {self.layout.entries} entries, too many for a search around each input"

    @classmethod
    def of(
        cls,
        call: str,
        graph: Graph,
        known: Network | None,
        report: Report = silent,
        *,
        steps: int,
        jobs: int = 1,
        folder: Path | None = None,
        is_written: bool = False,
    ) -> "LocalBounds":
        """For a graph with one output; norms that are known are not measured again.

        Where all is to be written, a search that seems to be in vain is not left out.
        """
        network = Network(call, widened(graph), report, known=known)
        (output,) = graph.outputs.values()
        return cls(call, Layout.of(network.plan, network.measure, output), network, steps, jobs, folder, is_written)

    def __call__(self, x: Tensor, pairs: Pairs, start: Tensor, enough: float, report: Report = silent) -> list[Proved]:
        """Radii of pairs of inputs (samples, *shape) and classes, in portions.

        Args:
            x: the inputs.
            pairs: of which a radius is asked for.
            start: what is known of each.
            enough: a radius that need not be exceeded.
            report: told how many pairs are done.
        """
        if self.note or not len(pairs):
            return []
        size = max(1, PORTION // self.layout.entries)
        portions = _portions(len(pairs), size, TRIAL if not self._is_tried and not self.is_written else size)
        found: list[Proved] = []
        done = 0
        for proved, first in self._portions(x, pairs, start, enough, portions):
            found.append(proved)
            done += len(proved.pairs)
            report("pairs of inputs and classes", done, len(pairs))
            if not (self._is_tried or self.is_written) and self._is_in_vain(proved.radii, first):
                self.note = f"minorants gained too little around the first inputs ({len(first)} pairs)"
                break
            self._is_tried = True
        return found

    def _portions(
        self, x: Tensor, pairs: Pairs, start: Tensor, enough: float, portions: tuple[Tensor, ...]
    ) -> Iterator[tuple[Proved, Tensor]]:
        """One after the other, or several at once, in their order; the first alone, for it may be the last."""

        def run(places: Tensor, *, is_trial: bool = False) -> tuple[Proved, Tensor]:
            with checked_arithmetic(self.call):
                return self._run(x, pairs[places], start[places], enough, is_trial), start[places]

        yield run(portions[0], is_trial=not (self._is_tried or self.is_written))
        if self.jobs == 1:
            yield from map(run, portions[1:])
            return
        threads = torch.get_num_threads()
        share = max(1, (os.cpu_count() or 1) // self.jobs)
        with ThreadPoolExecutor(self.jobs, initializer=torch.set_num_threads, initargs=(share,)) as pool:
            try:
                yield from pool.map(run, portions[1:])
            finally:
                pool.shutdown(cancel_futures=True)
                torch.set_num_threads(threads)

    def _run(self, x: Tensor, pairs: Pairs, start: Tensor, enough: float, is_trial: bool) -> Proved:
        used, places = pairs.samples.unique(return_inverse=True)
        inputs = x[used]
        local = Pairs(places, pairs.winners, pairs.others)
        centre = self.layout.centre(inputs[:, None])
        multipliers = self._searched(inputs, centre, local, start, enough, is_trial)
        return Proved(pairs, prove(self.layout, centre, local, multipliers), multipliers)

    def _searched(
        self, x: Tensor, centre: Centre, pairs: Pairs, start: Tensor, enough: float, is_trial: bool
    ) -> Multipliers:
        """By a search, or by one that was made before; whatever is in the folder is proved again."""
        path = None
        if self.folder is not None:
            sha = hashlib.sha256(self._key + repr(enough).encode())
            for part in (x, pairs.samples, pairs.winners, pairs.others, start):
                sha.update(part.contiguous().numpy().tobytes())
            path = self.folder / f"{sha.hexdigest()[:32]}.npz"
            try:
                kept = Multipliers.of_tensors(read_npz(path))
                if kept.fits(self.layout, len(pairs)):
                    return kept
            except (BadFile, OSError, KeyError, ValueError):
                pass  # there is none, or it is damaged
        limit = torch.full_like(start, enough)

        def is_hopeful(radii: Tensor) -> bool:
            return not is_trial or not self._is_in_vain(radii, start, HOPELESS)

        multipliers = self._search(centre, pairs, start, limit, self.steps, is_hopeful)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = io.BytesIO()
            np.savez(content, **{name: value.numpy() for name, value in multipliers.tensors().items()})  # type: ignore[arg-type]
            write_atomically(path, content.getvalue())
        return multipliers

    @staticmethod
    def _is_in_vain(radii: Tensor, start: Tensor, factor: float = WORTH) -> bool:
        return float((radii > factor * start).double().mean()) < SHARE


def _portions(count: int, size: int, first: int) -> tuple[Tensor, ...]:
    """Places from 0 on, in parts of one size but the first."""
    places = torch.arange(count)
    return (places[: min(first, size)], *(part for part in places[min(first, size) :].split(size) if len(part)))
