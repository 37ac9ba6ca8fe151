"""Let `python -m ds_lightning` do what `ds-lightning` does."""

import sys

from ds_lightning.cli import main

sys.exit(main())
