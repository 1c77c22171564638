"""What kinds of steps a run consists of, at the default intervals: the weights of a mean step."""

from ds_kfac.config.keys import parse
from ds_kfac.config.resolve import resolve

UPDATE, REFRESH = resolve(parse({}), fisher="empirical")[0].schedule.intervals(10**9)
"""Steps between factor updates and between refreshes, after the burn-in."""
WEIGHTS = {
    "preconditioning only": 1 - 1 / UPDATE,
    "factor update": 1 / UPDATE - 1 / REFRESH,
    "refresh": 1 / REFRESH,
}
"""Kind of step -> its part of all steps."""
ROW = f"mean at intervals {UPDATE}/{REFRESH}"
