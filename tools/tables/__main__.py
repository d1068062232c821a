"""python tools/tables: see command.py."""

import sys
from pathlib import Path

if not __package__:  # the folder was run, and Python looks for modules in it
    sys.path[:1] = [str(Path(__file__).resolve().parents[1])]

from tables.command import main

sys.exit(main())
