"""``python -m kda``: see docs/cli.md."""

import os
import sys

from ._start import check_folder

check_folder(os.path.dirname(__file__))  # a conflict with another project's kda is silent in `import kda`

from .cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
