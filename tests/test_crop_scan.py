"""The scan of a data set tells sound videos from unusable ones, and why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import clips
import pytest

from tool_workers.scan import scan, table


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    sound = clips.make("h264", folder).path
    clips.make("h264-one-frame", folder)
    data = bytearray(sound.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 300] = bytes(300)
    (folder / "hole.mp4").write_bytes(data)
    (folder / "text.mp4").write_text("not a video")
    return folder


def test_every_file_gets_its_finding(folder: Path) -> None:
    names = ["h264.mp4", "h264-one-frame.mp4", "hole.mp4", "text.mp4", "missing.mp4"]
    findings = list(scan([folder / name for name in names]))
    assert [Path(finding.video).name for finding in findings] == names
    assert [finding.problem for finding in findings] == ["", "too_short", "damaged", "unreadable", "not_found"]
    assert findings[0].duration == pytest.approx(4.0)
    text = table(findings)
    assert "a part of the file is blank" in text
    assert text.endswith("5 files, 0.00 h: 1 sound, 1 too_short, 1 damaged, 1 unreadable, 1 not_found.")


def test_the_command_searches_folders_and_fails_on_findings(folder: Path) -> None:
    command = [sys.executable, "-m", "tool_workers.scan", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
    assert "4 files" in result.stdout
    sound = subprocess.run([*command[:-1], str(folder / "h264.mp4")], capture_output=True, timeout=120, check=False)
    assert sound.returncode == 0
