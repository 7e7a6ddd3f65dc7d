"""Pipelines: models cut into stages, trained with several microbatches in flight."""

from jdistgrad.pipeline.batches import whole as whole
from jdistgrad.pipeline.report import Report as Report
from jdistgrad.pipeline.stages import BATCH as BATCH, Stage as Stage
from jdistgrad.schedules.forecasting import Forecast as Forecast, forecast as forecast
from jdistgrad.schedules.orders import (
    forward_only as forward_only,
    gpipe as gpipe,
    interleaved as interleaved,
    one_f_one_b as one_f_one_b,
    zbv as zbv,
    zero_bubble as zero_bubble,
)
from jdistgrad.schedules.playing import check as check
from jdistgrad.schedules.schedule import Action as Action, Costs as Costs, Kind as Kind, Schedule as Schedule

__all__ = [
    "Action",
    "BATCH",
    "Costs",
    "Forecast",
    "Kind",
    "Report",
    "Schedule",
    "Stage",
    "check",
    "forecast",
    "forward_only",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "whole",
    "zbv",
    "zero_bubble",
]


def __dir__() -> list[str]:
    return __all__
