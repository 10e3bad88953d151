"""Importing the flows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_prefects_home_is_made_with_the_folders_above_it(tmp_path: Path) -> None:
    home = tmp_path / "work" / "prefect"
    environment = {**os.environ, "PREFECT_HOME": str(home)}
    code = "import flows, prefect.settings as s; print(s.get_current_settings().home)"
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == str(home), done.stderr
    assert home.is_dir()
    assert "Failed to create the Prefect home" not in done.stderr
