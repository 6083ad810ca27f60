from pathlib import Path

from fsdp_tp.parity.report import Report


def write_html(report: Report, path: Path) -> None: ...
