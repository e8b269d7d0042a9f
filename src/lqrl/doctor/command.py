"""The command: sections are printed as they are found; the exit status is 1 when something that is there fails."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import lqrl
from lqrl.doctor.packages import optional_section, required_section
from lqrl.doctor.report import TRACEBACK_VARIABLE, Section

DESCRIPTION = """\
Say what this machine can run and test it: packages, kernels, formats, caches, engines.

ok        works as it is meant to
emulated  gives the right results on a slower way
missing   is not there; the last column says what to install
FAILED    is there and fails its self-test; the exit status is then 1
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every self-test and print a table, or JSON.

    Args:
        arguments: words of the command line; ``None`` for those of the process.

    Returns:
        0, or 1 when a part that is installed fails its self-test; 141, as a shell reports it, when the reader of the
        output has gone, such as ``head``.
    """
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="lqrl doctor", description=DESCRIPTION, formatter_class=formatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object in the place of tables")
    options = parser.parse_args(arguments)
    try:
        status = _report(as_json=options.json)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered cannot be written at exit
        return 128 + signal.SIGPIPE
    return status


def _report(*, as_json: bool) -> int:
    found: list[Section] = []
    for section in _quietly(_sections()):
        found.append(section)
        if not as_json:
            print(f"{section}\n", flush=True)
    failed = [f"{section.title}: {row.name}" for section in found for row in section.rows if row.status == "FAILED"]
    if as_json:
        sections = [section.as_json() for section in found]
        print(json.dumps({"lqrl": lqrl.__version__, "failed": failed, "sections": sections}, indent=2))
    elif failed:
        print(f"FAILED: {'; '.join(failed)} ({TRACEBACK_VARIABLE}=1 shows the first one's traceback)")
    else:
        print("Everything that is installed passes its self-test.")
    return 1 if failed else 0


def _sections() -> Iterator[Section]:
    yield required_section()
    if "torch" not in sys.modules:
        return  # its row says why; nothing else can be imported
    from lqrl.doctor.formats import formats_section
    from lqrl.doctor.hopper import hopper_section
    from lqrl.doctor.machine import devices, machine_section
    from lqrl.doctor.native import native_section
    from lqrl.doctor.triton_kernels import triton_section

    yield machine_section()
    yield native_section()
    yield triton_section()
    yield hopper_section()
    for device in devices():
        yield formats_section(device)
    from lqrl.doctor.engines import caches_section, engines_section

    for device in devices():
        yield caches_section(device)
    yield engines_section(devices())
    yield optional_section()


def _quietly(sections: Iterator[Section]) -> Iterator[Section]:
    """``sections``, with what other packages print, log and warn of left out: the rows say what matters."""
    while True:
        with _quiet():
            section = next(sections, None)
        if section is None:
            return
        yield section


@contextmanager
def _quiet() -> Iterator[None]:
    disabled, sink = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(sink), redirect_stderr(sink):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
