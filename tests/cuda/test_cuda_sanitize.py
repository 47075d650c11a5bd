"""What `sanitize.sh` makes of what a tool says: a played compute-sanitizer says it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.launches import wanted
from tests.cuda.sides import GPU

SCRIPT = Path(__file__).with_name("sanitize.sh")
FAKE = """#!/bin/sh
case "$*" in
*planted*) exit ${PLANTED:-9} ;;
esac
sleep ${SLOW:-0}
while [ "$1" != --launches ]; do shift; done
cp "$KERNELS" "$2"
echo "${RAN:-12 passed, 3 deselected in 4.56s}"
echo "${SAID:-========= ERROR SUMMARY: 0 errors}"
exit ${CODE:-0}
"""
TORCH = """========= Error: Race reported between Write access at void at::native::reduce+0x90
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"""
pytestmark = pytest.mark.skipif(GPU, reason="there is a GPU, and the tool itself")


@pytest.mark.parametrize(("told", "failure"), [
    ({"LEFT_OUT": "nothing"}, ""),
    ({"TOOLS": "racecheck", "SAID": TORCH, "CODE": "9"}, ""),
    ({"TOOLS": "racecheck", "SAID": TORCH.replace("at::native::", ""), "CODE": "9"}, "races"),
    ({"PLANTED": "0"}, "does not find the planted fault"),
    ({"SAID": "========= ERROR SUMMARY: 2 errors", "CODE": "9"}, "errors, exit 9"),
    ({"RAN": "1 failed, 11 passed in 4.56s", "CODE": "1"}, "the tests themselves, exit 1"),
    ({"SECONDS_EACH": "1", "SLOW": "9"}, "no test ended"),
    ({"LEFT_OUT": "many.cu many"}, "['many.cu many']"),
])  # fmt: skip
def test_what_the_tool_says_decides(told: dict[str, str], failure: str, tmp_path: Path) -> None:
    kernels = wanted() - {told.get("LEFT_OUT", "")}
    (tmp_path / "kernels").write_text("".join(f"{name}\n" for name in kernels))
    counts = f'exec "{sys.executable}" "$@"' if "LEFT_OUT" in told else "exit 0"
    for name, text in (("compute-sanitizer", FAKE), ("python3", f"#!/bin/sh\n{counts}\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    given = {"TOOLS": "memcheck", "FILES": "every", "OUT": str(tmp_path), **told}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "KERNELS": str(tmp_path / "kernels")}
    done = subprocess.run(
        ["sh", str(SCRIPT)], env=os.environ | path | given, capture_output=True, text=True
    )
    said = done.stdout + done.stderr
    assert failure in said
    assert (done.returncode, "sanitize: clean" in said) == ((1, False) if failure else (0, True))
