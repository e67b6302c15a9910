"""The report on judges, as `trainspan judges` makes it."""

from dataclasses import dataclass
from typing import Final

from trainspan_processing.agreement.report import judge_report
from trainspan_processing.read.source import Source
from trainspan_schemas.artifacts.judge_report import JudgeReport, judge_figures
from trainspan_viewer.queries.params import Params, Part
from trainspan_viewer.queries.result_cache import ResultCache
from trainspan_viewer.queries.sources import Sources

__all__ = ["AgreementModel", "load_agreement"]

_PAGE: Final = 50
_reports: Final[ResultCache[JudgeReport]] = ResultCache(20_000_000)


@dataclass(frozen=True, slots=True)
class AgreementModel:
    """The page."""

    report: JudgeReport
    part: Part
    """Of the disagreements."""
    params: Params


def load_agreement(sources: Sources, params: Params) -> AgreementModel:
    """Of all stored rollouts, or of a `run` and `round`. Raises StoreError, or UsageError for a round that is no number."""
    run_id = params.text("run").strip() or None
    round_ = params.integer("round", 0) if params.text("round").strip() else None
    threshold = params.number("threshold")
    chosen = 0.5 if threshold is None else threshold
    sources.store.hold()

    def made() -> JudgeReport:
        with Source(sources.store.stores, allow_behind=True) as source:
            return judge_report(source, judge_figures(), run_id=run_id, round_=round_, threshold=chosen)

    report = _reports.get((sources.store.stores, run_id, round_, chosen), made, is_live=True)
    return AgreementModel(report, Part(params.integer("from", 0), _PAGE, len(report["disagreements"])), params)
