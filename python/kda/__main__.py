"""``python -m kda``: see docs/cli.md."""

import os
import sys

from ._name import check

check(os.path.dirname(__file__))  # a conflict with another project's kda is silent in `import kda`

from .cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
