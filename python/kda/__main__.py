"""``python -m kda``: see docs/cli.md."""

import os
import sys

from ._name import check

check(os.path.dirname(__file__))  # where `import kda` is another project's, which says nothing

from .cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
