"""``python -m jetplane.cli``, which is ``python -m jetplane``."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
