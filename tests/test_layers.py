"""The architecture of the code itself: imports point downwards, and the notation needs no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_imports_point_downwards_only():
    lint = Path(sys.executable).with_name("lint-imports")
    found = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_help_imports_no_torch():
    code = (
        "import sys\n"
        "from transfusion.cli import main\n"
        "try:\n    main(['transport', '--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'scipy')))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "--onto" in found.stdout
