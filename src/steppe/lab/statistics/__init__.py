"""Statistics of runs with several seeds: means, intervals, paired differences, and verdicts in words.

Within a problem every group is compared with the base, seed by seed: the same seed means the same initial weights and
the same batches, so the differences within a seed have less variance than the difference of the means.
"""

from .family import FEWEST, POOLED, Difference, difference_of, judged, p_value
from .groups import EQUAL, Group, group_records, larger_is_better, problem_of, stretched
from .means import CONFIDENCE, Mean, mean_of
from .table import BASE_ROLES, Row, against_best, paired, summarise

__all__ = [
    "BASE_ROLES", "CONFIDENCE", "EQUAL", "FEWEST", "POOLED", "Difference", "Group", "Mean", "Row", "against_best",
    "difference_of", "group_records", "judged", "larger_is_better", "mean_of", "p_value", "paired", "problem_of",
    "stretched", "summarise",
]  # fmt: skip
