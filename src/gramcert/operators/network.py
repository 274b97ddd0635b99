"""A network measured here and now: for whoever needs its constant and not a report."""

import warnings

from gramcert.certified.deployed import TOLERANCES
from gramcert.operators.graph import Graph
from gramcert.operators.measurement import Measured, Measurement
from gramcert.operators.propagation import Followed, Follower, Plan, known_norms
from gramcert.progress import Report, silent


class Network:
    """The constants of a graph, each norm as tight as 1e-3, and much tighter where it may be 1."""

    def __init__(
        self,
        call: str,
        graph: Graph,
        report: Report = silent,
        *,
        is_measured: bool = True,
        known: "Network | None" = None,
    ) -> None:
        self.plan = Plan.of(graph.needed())
        self._measured: dict[Measurement, Measured] = {}
        # What is known to be unbounded is not worth a measurement.
        self.plan.is_measured = is_measured and not self.plan.is_unbounded
        steps = self.plan.steps
        # What another network has measured is not measured again.
        before = {} if known is None else {item.digest: found for item, found in known._measured.items()}
        for done, step in enumerate(steps, 1):
            found = before.get(step.measurement.digest) if before else None
            if found is None:
                found = step.measurement.run(TOLERANCES[0], None)
            if found.stopped:  # a number carries no notes
                name, most = self.plan.graph.nodes[step.nodes[-1]].label, f"at most {found.upper:.6g}"
                warnings.warn(f"{call}({name}): its norm is only known to be {most}; {found.stopped}", stacklevel=4)
            self._measured[step.measurement] = found
            report("layers", done, len(steps))

    def require_bounded(self, call: str) -> None:
        """Refuse a network that is known to have no constant."""
        if self.plan.is_unbounded:
            raise TypeError(f"{call}: {self.follow().reasons[0]}")

    def measure(self, measurement: Measurement) -> Measured:
        """What was found."""
        return self._measured[measurement]

    @property
    def norms(self) -> dict[str, float]:
        """Of linear maps, by their nodes."""
        return known_norms(self.plan, self.measure)

    def follow(self) -> Followed:
        """The constants of all values."""
        return Follower(self.plan, self.measure).run()
