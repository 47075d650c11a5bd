"""Blocks of documents that ask a server run against one."""

from __future__ import annotations

import pytest

from tests.documents import ROOT, blocks
from tests.server.rig import Rig

BLOCKS = [block.text for block in blocks(ROOT / "docs" / "dialects.md", "py")]


@pytest.mark.parametrize("text", BLOCKS, ids=lambda text: text.split()[1])
def test_clients_of_other_servers(rig: Rig, text: str) -> None:
    pytest.importorskip(text.split()[1])
    assert "http://127.0.0.1:8080" in text and '"smollm2"' in text
    here = text.replace("http://127.0.0.1:8080", rig.url).replace('"smollm2"', '"tiny-dense"')
    exec(compile(here, "block", "exec"), {})


def test_there_are_blocks_to_test() -> None:
    assert len(BLOCKS) == 2
