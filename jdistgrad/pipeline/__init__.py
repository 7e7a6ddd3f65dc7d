"""Pipelines: schedules as data, what they cost, and how they are carried out."""

from jdistgrad.pipeline.batches import whole as whole
from jdistgrad.pipeline.checking import check as check
from jdistgrad.pipeline.costs import Costs as Costs
from jdistgrad.pipeline.forecasting import Forecast as Forecast, forecast as forecast
from jdistgrad.pipeline.orders import (
    forward_only as forward_only,
    gpipe as gpipe,
    interleaved as interleaved,
    one_f_one_b as one_f_one_b,
    zbv as zbv,
    zero_bubble as zero_bubble,
)
from jdistgrad.pipeline.report import Report as Report
from jdistgrad.pipeline.schedule import Action as Action, Kind as Kind, Schedule as Schedule
from jdistgrad.pipeline.stages import BATCH as BATCH, Stage as Stage
