"""python tools/gpu_suite: see command.py."""

import sys
from pathlib import Path

if not __package__:  # the folder was run, and Python looks for modules in it
    tools = Path(__file__).resolve().parents[1]
    sys.path[:1] = [str(tools), str(tools.parent / "python")]

from gpu_suite.command import main

sys.exit(main())
