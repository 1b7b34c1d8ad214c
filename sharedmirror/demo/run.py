"""Runs the demo from nothing to nothing: the story, the take-down, the verdict and the status table.

Exit code 0 only if every check held. This process never imports torch.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from sharedmirror.demo.processes import DemoFailure, exists, signals_raise
from sharedmirror.demo.report import Report
from sharedmirror.demo.story import Story
from sharedmirror.errors import SharedMirrorError
from sharedmirror.status_view import render

EXIT_INTERRUPTED = 130


def run(console: Console, *, device: str = "auto") -> int:
    """Tell the story with engines on ``device`` ("auto", "cpu" or "cuda").

    Returns 0 if every check held, 1 if one did not, 130 if interrupted; in each case all was taken down.
    """
    report = Report(console)
    story = Story(report, device)
    try:
        with signals_raise(), tempfile.TemporaryDirectory(prefix="sharedmirror-demo-") as folder:
            story.tell(Path(folder))
    except KeyboardInterrupt:
        report.step("interrupted; everything was taken down")
        return EXIT_INTERRUPTED
    except (DemoFailure, SharedMirrorError, OSError) as error:
        report.step(str(error))
        report.check("the story went on to its end", False)
    report.check("no process is left", not any(exists(pid) for pid in story.pids))
    report.check("no segment is left in /dev/shm", not story.segments_left())
    code = report.verdict()
    if story.status is not None:
        report.step("what `sharedmirror status` said while the second engine ran:")
        for part in render(story.status):
            console.print(part)
    return code
