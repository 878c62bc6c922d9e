"""Numbers for people and machines out of a run's records: statistics, summaries, live views, plots, comparisons."""

from rl_harness.reports.compare import Comparison, compare_runs, comparison_text
from rl_harness.reports.difference import Difference, paired_difference
from rl_harness.reports.episode_report import TaskReport, show_task
from rl_harness.reports.episode_text import task_text
from rl_harness.reports.json_view import json_text
from rl_harness.reports.plot import write_plot
from rl_harness.reports.run_report import RunReport, RunRow, list_runs, show_run
from rl_harness.reports.summary import Summary, passes, summarise
from rl_harness.reports.text import report_text, runs_text
from rl_harness.reports.training import gap_warning
from rl_harness.reports.view import View, Waiting
from rl_harness.reports.views import make_view

__all__ = [
    "Comparison",
    "Difference",
    "RunReport",
    "RunRow",
    "Summary",
    "TaskReport",
    "View",
    "Waiting",
    "compare_runs",
    "comparison_text",
    "gap_warning",
    "json_text",
    "list_runs",
    "make_view",
    "paired_difference",
    "passes",
    "report_text",
    "runs_text",
    "show_run",
    "show_task",
    "summarise",
    "task_text",
    "write_plot",
]
