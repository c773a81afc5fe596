"""Two evaluations of the same prompts, compared prompt by prompt."""

import math
from typing import NamedTuple

from torch import Tensor


class Comparison(NamedTuple):
    """Scores of the same prompts before and after, over those that were scored both times.

    Attributes:
        before: mean.
        after: mean.
        difference: mean of the differences.
        standard_error: of that mean, from the sample deviation of the differences; NaN with fewer than two prompts.
        prompts: how many were scored both times.
    """

    before: float
    after: float
    difference: float
    standard_error: float
    prompts: int

    @property
    def ratio(self) -> float:
        """The difference in units of its standard error; infinite where all differences are equal, NaN where zero."""
        if self.standard_error > 0:
            return self.difference / self.standard_error
        return math.copysign(math.inf, self.difference) if self.standard_error == 0 and self.difference else math.nan

    def words(self) -> str:
        """What happened, as the rest of a sentence."""
        if self.prompts == 0:
            return "was not scored on one prompt both times"
        if self.difference == 0:
            return f"did not move: {self.before:.4g} over {self.prompts} prompts"
        values = f"from {self.before:.4g} to {self.after:.4g}"
        if self.prompts == 1:
            return f"went {values} on one prompt, which says little"
        verb = "rose" if self.difference > 0 else "fell"
        if self.standard_error == 0:
            return f"{verb} {values}, by the same on each of {self.prompts} prompts"
        margin = f"by {abs(self.difference):.3g} ± {self.standard_error:.2g} a prompt over {self.prompts} prompts"
        if abs(self.ratio) < 2:
            return f"went {values}, {margin}, which may be chance ({abs(self.ratio):.2g} standard errors)"
        return f"{verb} {values}, {margin}, {abs(self.ratio):.3g} standard errors"

    def cells(self) -> tuple[str, str, str, str]:
        """Before, after, difference and prompts for a table; a figure that there is not is left out."""
        if self.prompts == 0:
            return "-", "-", "-", "0"
        change = f"{self.difference:+.4f}"
        if math.isfinite(self.standard_error):
            change += f" ± {self.standard_error:.4f}"
        if math.isfinite(self.ratio):
            change += f" ({self.ratio:+.1f})"
        return f"{self.before:.4f}", f"{self.after:.4f}", change, str(self.prompts)

    def as_dict(self) -> dict[str, float | int | None]:
        """All figures, ``None`` where there is no finite one."""
        figures = {**self._asdict(), "ratio": self.ratio}
        return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def compare(before: Tensor, after: Tensor) -> Comparison:
    """Compare scores of the same prompts in the same order.

    Args:
        before: (N,) float64, NaN where not scored.
        after: (N,) likewise.
    """
    both = before.isfinite() & after.isfinite()
    before, after = before[both], after[both]
    change = after - before
    n = len(change)
    error = change.std(correction=1).item() / math.sqrt(n) if n > 1 else math.nan
    return Comparison(before.mean().item(), after.mean().item(), change.mean().item(), error, n)
